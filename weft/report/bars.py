"""Bar charts by rank: load before and after balancing, and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.core import units
from weft.core.indices import split_evenly
from weft.plan.balance import ratio
from weft.report.case import Case
from weft.report.draw import Figure, Label, Rect, Shape
from weft.report.frame import LEFT, Chart, Scale, ticks
from weft.report.palette import rank_color

RIGHT, BOTTOM = 470.0, 196.0
MOST_BARS = 128
Show = Callable[[float], str]


def load_bars(case: Case) -> Figure:
    """Draw the load of each rank: pale before balancing, solid after, with the mean and the bound."""
    loads = case.loads
    mean = sum(loads.after) / len(loads.after)
    least = mean * (loads.bound or 1.0)
    show = units.time if loads.unit.startswith("seconds") else units.count
    chart = _chart(max(*loads.after, *loads.before, least))
    sides = (0, 1) if loads.before else (None, None)
    line = "mean" if loads.bound is None else "bound"
    shapes = [
        *_axis(chart, show),
        *_bars(case, chart, loads.before, show, kind="load-before", side=sides[0]),
        *_bars(case, chart, loads.after, show, kind="load-after", side=sides[1]),
        chart.line(((0, least), (1, least)), "ink", 1.4, dashed=True, kind=line),
    ]
    legend = "pale: unbalanced · solid: planned · " if loads.before else ""
    after = ratio(loads.after)
    change = f"{ratio(loads.before):.3f}× → {after:.3f}×" if loads.before else f"{after:.3f}×"
    bound = f", bound {loads.bound:.3f}×" if loads.bound is not None else ""
    caption = f"{loads.unit.capitalize()} by rank. {loads.note}".strip()
    title = f"Load: busiest over mean {change}{bound}"
    return chart.figure("loads", title, shapes, [("", f"{legend}dashed: {line}")], caption=caption)


def memory_bars(case: Case) -> Figure:
    """Draw the peak bytes of each rank: its own tensors, and messages and partial results on top."""
    peak, home = case.memory, case.home_memory
    chart = _chart(max(peak))
    shapes = [
        *_axis(chart, units.size),
        *_bars(case, chart, peak, units.size, kind="memory", strength=0.45 if home else 1.0),
        *_bars(case, chart, home, units.size, kind="memory-home"),
    ]
    entries = [("", "solid: own q, k, v, output · pale: under way, unfinished")] * bool(home)
    most = max(range(len(peak)), key=lambda rank: (peak[rank], -rank))
    title = f"Memory: at most {units.size(peak[most])}, on rank {most}"
    caption = "Of one attention; weights and activations of other layers are not in it."
    return chart.figure("memory", title, shapes, entries, caption=caption)


def _chart(top: float) -> Chart:
    return Chart(Scale(0, 1, LEFT, RIGHT), Scale(0, top or 1.0, BOTTOM, 14.0))


def _axis(chart: Chart, show: Show) -> list[Shape]:
    return chart.rows(lambda tick: units.short(show(tick)), ticks(chart.y.high, 4))


def grouped(values: Sequence[float], most: int = MOST_BARS) -> list[tuple[int, int, float]]:
    """Return (first rank, last rank, largest value) for at most `most` groups of ranks."""
    runs = split_evenly(len(values), min(len(values), most)) if values else []
    return [(start, stop - 1, max(values[start:stop])) for start, stop in runs]


def _bars(
    case: Case,
    chart: Chart,
    values: Sequence[float],
    show: Show,
    *,
    kind: str,
    side: int | None = None,
    strength: float = 1.0,
) -> list[Shape]:
    """Return one bar per rank; with `side`, only the left or right half of its slot."""
    groups = grouped(values)
    place = (RIGHT - LEFT) / max(1, len(groups))
    width = place * (0.8 if side is None else 0.4)
    shapes: list[Shape] = []
    for i, (first, last, value) in enumerate(groups):
        color, shade = rank_color(first, case.ranks, case.machines)
        shade *= 0.4 if side == 0 else strength
        x = LEFT + place * (i + 0.1) + (width if side == 1 else 0.0)
        y = chart.y(value)
        whom = f"rank {first}" if first == last else f"ranks {first} to {last}, at most"
        shapes.append(Rect(x, y, width, BOTTOM - y, color, shade, kind, f"{whom}: {show(value)}"))
        if side != 0 and kind != "memory-home" and i % max(1, -(-len(groups) // 16)) == 0:
            shapes.append(Label(LEFT + place * (i + 0.5), BOTTOM + 15, str(first), anchor="middle"))
    return shapes
