"""Layouts: which rank has which part of a tensor while each stage of a model runs."""

from __future__ import annotations

from collections.abc import Mapping

from weft.core.errors import InputError
from weft.core.indices import split_evenly
from weft.plan.stage_layouts import WHOLE, StageLayouts
from weft.report.draw import Figure, Label, Polyline, Rect, Shape
from weft.report.palette import rank_color

CELL, GAP, LEFT, TOP, BELOW = 132.0, 146.0, 62.0, 44.0, 30.0


def layouts(route: StageLayouts, sizes: Mapping[str, int], ranks: int) -> Figure:
    """A square for each stage, of one dim downwards and one across, in the colours of the ranks.

    A line runs along what the stage mixes: in a right route it never leaves a colour.
    """
    if len(sizes) != 2 or any(len(layout) != 1 for layout in route.layouts):
        raise InputError(f"Layouts of {len(sizes)} dims cannot be drawn.", hint="Give two dims and one axis.")
    down, across = sizes
    shapes: list[Shape] = []
    for number, (stage, (sharded,)) in enumerate(zip(route.stages, route.layouts, strict=True)):
        x = LEFT + number * (CELL + GAP)
        shapes.append(Label(x + CELL / 2, TOP - 26, stage.name, 13.5, "ink", "middle", bold=True))
        shapes.append(
            Label(
                x + CELL / 2, TOP - 9, f"mixes {', '.join(stage.mixes) or 'nothing'}", 12.5, anchor="middle"
            )
        )
        shapes += _parts(x, sharded, sizes, ranks)
        for dim in stage.mixes:
            shapes.append(Polyline(_along(x, dim == down, sizes), "ink", 2.5, kind="mixes"))
        for move in route.moves[number + 1]:
            shapes += _arrow(x + CELL, str(move))
        shapes.append(Label(x + CELL / 2, TOP + CELL + 18, f"{across} →", 12.5, anchor="middle"))
    shapes.append(Label(LEFT - 8, TOP + CELL / 2, f"{down} ↓", 12.5, anchor="end"))
    end = GAP if route.moves[-1] else LEFT
    width = LEFT + len(route.stages) * (CELL + GAP) - GAP + end
    title = f"{ranks} ranks, one colour each: what every stage mixes is whole on a rank"
    return Figure("layouts", title, width, TOP + CELL + BELOW, tuple(shapes), wide=True)


def _parts(x: float, sharded: str, sizes: Mapping[str, int], ranks: int) -> list[Shape]:
    down, _ = sizes
    if sharded == WHOLE:
        return [Rect(x, TOP, CELL, CELL, "panel", kind="whole", tip="all of it on every rank", outline="ink")]
    found: list[Shape] = []
    scale = CELL / sizes[sharded]
    for rank, (start, stop) in enumerate(split_evenly(sizes[sharded], ranks)):
        color, strength = rank_color(rank, ranks)
        tip = f"rank {rank}: {sharded} {start} to {stop - 1}"
        a, b = start * scale, (stop - start) * scale
        box = (x, TOP + a, CELL, b) if sharded == down else (x + a, TOP, b, CELL)
        found.append(Rect(*box, color, strength, "shard", tip))
    return found


def _along(x: float, down: bool, sizes: Mapping[str, int]) -> tuple[tuple[float, float], ...]:  # noqa: FBT001
    """Through the middle of one row, or column."""
    other = list(sizes.values())[1 if down else 0]
    at = CELL * (other // 2 + 0.5) / other
    if down:
        return (x + at, TOP + 4), (x + at, TOP + CELL - 4)
    return (x + 4, TOP + at), (x + CELL - 4, TOP + at)


def _arrow(x: float, words: str) -> list[Shape]:
    y, a, b = TOP + CELL / 2, x + 10, x + GAP - 10
    return [
        Polyline(((a, y), (b, y)), "muted", 1.5),
        Polyline(((b - 6, y - 5), (b, y), (b - 6, y + 5)), "muted", 1.5),
        Label((a + b) / 2, y - 8, words, 12.0, anchor="middle"),
    ]
