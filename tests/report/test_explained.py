"""Plans by layer: read from beside a trace, shown on its page, and refused if they are not plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.report.toys import two_ranks
from weft.core.errors import InputError
from weft.plan.explanation import Explanation, LayerPlan
from weft.report.cases import report_cases
from weft.report.page import page
from weft.report.sources import measured

LAYERS = (
    LayerPlan("Wan", 3, 1, "usp:2x2+balanced", "<because>", 4, 1.0123, 1.25, 1.1),
    LayerPlan("Wan", 4, 0, "ring", "it is even", 0, None, None, None),
)


def test_a_page_has_the_plans_of_the_layers(tmp_path: Path) -> None:
    saved = tmp_path / "plans.json"
    saved.write_text(Explanation(LAYERS, ("ulysses",)).json())
    explained = Explanation.load(saved)
    assert explained == Explanation(LAYERS, ("ulysses",)) and explained.gain == 1.1
    text = page(report_cases([measured(two_ranks(measured=True), explained=explained)]))
    row = ["3/1", "usp:2x2+balanced", "1.012", "1.250", "1.100", "4"]
    assert "".join(f"<td>{cell}</td>" for cell in row) in text
    assert "<td>4</td><td>ring</td><td>–</td>" in text
    assert "Plans by layer" not in page(report_cases([measured(two_ranks(measured=True))]))


@pytest.mark.parametrize("change", [{"layer": "x"}, {"gain": [1]}, {"more": 1}, {"plan": None}])
def test_hostile_plans_are_refused(tmp_path: Path, change: dict[str, object]) -> None:
    table = json.loads(Explanation(LAYERS, ()).json())
    table["layers"][0] |= change
    (tmp_path / "plans.json").write_text(json.dumps(table))
    with pytest.raises(InputError, match="plans.json"):
        Explanation.load(tmp_path / "plans.json")
