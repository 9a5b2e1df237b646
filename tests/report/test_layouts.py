"""The figure of layouts: what a stage mixes stays in one colour, and the one in the docs is as drawn."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.layouts import layouts
from weft.core.errors import InputError
from weft.plan.stage_layouts import ModelStage, choose_layouts
from weft.report.draw import Figure, Label, Polyline, Rect

DOCS = Path(__file__).parents[2] / "docs" / "figures" / "switching.svg"
SIZES = {"time": 8, "space": 12}
SPATIAL, TEMPORAL = ModelStage("spatial block", ("space",)), ModelStage("temporal block", ("time",))


def figure(*stages: ModelStage, ranks: int = 4) -> Figure:
    return layouts(choose_layouts(stages, SIZES, ranks, exit="free"), SIZES, ranks)


def holds(rect: Rect, line: Polyline) -> bool:
    return all(
        rect.x <= x <= rect.x + rect.width and rect.y <= y <= rect.y + rect.height for x, y in line.points
    )


@pytest.mark.parametrize("ranks", [1, 3, 4, 5])
def test_what_a_stage_mixes_is_all_in_one_shard(ranks: int) -> None:
    drawn = figure(SPATIAL, TEMPORAL, SPATIAL, ranks=ranks).shapes
    shards = [shape for shape in drawn if isinstance(shape, Rect) and shape.kind == "shard"]
    mixes = [shape for shape in drawn if isinstance(shape, Polyline) and shape.kind == "mixes"]
    assert (len(shards), len(mixes)) == (3 * ranks, 3)
    for line in mixes:
        assert sum(holds(rect, line) for rect in shards) == 1


def test_moves_are_listed_between_the_stages_and_a_whole_tensor_has_no_color() -> None:
    drawn = figure(ModelStage("all", ("time", "space")), TEMPORAL).shapes
    assert [s.text for s in drawn if isinstance(s, Label) and s.text.startswith("split")] == ["split space"]
    assert [s.fill for s in drawn if isinstance(s, Rect) and s.kind == "whole"] == ["panel"]


def test_three_dims_are_refused() -> None:
    sizes = {**SIZES, "level": 3}
    with pytest.raises(InputError, match="3 dims"):
        layouts(choose_layouts([SPATIAL], sizes, 2), sizes, 2)


def test_the_one_in_the_docs_is_what_is_drawn() -> None:
    assert DOCS.read_text() == figure(SPATIAL, TEMPORAL, SPATIAL).svg()
