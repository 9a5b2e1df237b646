"""Bar charts by rank: load before and after balancing, and peak memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weft.core import units
from weft.core.indices import split_evenly
from weft.plan.balance import ratio
from weft.report.case import Case
from weft.report.draw import Figure, Label, Polyline, Rect, Shape, rules
from weft.report.frame import ticks
from weft.report.palette import rank_color

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 480.0, 244.0, 62.0, 470.0, 14.0, 196.0
MOST_BARS = 128
Show = Callable[[float], str]


def load_bars(case: Case) -> Figure:
    """Draw the load of each rank: pale before balancing, solid after, with the mean and the bound."""
    loads = case.loads
    mean = sum(loads.after) / len(loads.after)
    least = mean * (loads.bound or 1.0)
    top = max(*loads.after, *loads.before, least) or 1.0
    show = units.time if loads.unit.startswith("seconds") else units.count
    shapes: list[Shape] = _axis(top, show)
    shapes += _bars(case, loads.before, top, show, kind="load-before", side=0 if loads.before else None)
    shapes += _bars(case, loads.after, top, show, kind="load-after", side=1 if loads.before else None)
    y = _height(least, top)
    line = "mean" if loads.bound is None else "bound"
    shapes.append(Polyline(((LEFT, y), (RIGHT, y)), "ink", 1.4, dashed=True, kind=line))
    legend = "pale: unbalanced · solid: planned · " if loads.before else ""
    shapes.append(Label(LEFT, HEIGHT - 8, f"{legend}dashed: {line}", 12.5))
    after = ratio(loads.after)
    change = f"{ratio(loads.before):.3f}× → {after:.3f}×" if loads.before else f"{after:.3f}×"
    bound = f", bound {loads.bound:.3f}×" if loads.bound is not None else ""
    caption = f"{loads.unit.capitalize()} by rank. {loads.note}".strip()
    title = f"Load: busiest over mean {change}{bound}"
    return Figure("loads", title, WIDTH, HEIGHT, tuple(shapes), caption=caption)


def memory_bars(case: Case) -> Figure:
    """Draw the peak bytes of each rank: its own tensors, and messages and partial results on top."""
    peak, home = case.memory, case.home_memory
    top = max(peak) or 1.0
    shapes: list[Shape] = _axis(top, units.size)
    shapes += _bars(case, peak, top, units.size, kind="memory", strength=0.45 if home else 1.0)
    shapes += _bars(case, home, top, units.size, kind="memory-home")
    if home:
        shapes.append(
            Label(LEFT, HEIGHT - 8, "solid: own q, k, v, output · pale: under way, unfinished", 12.5)
        )
    most = max(range(len(peak)), key=lambda rank: (peak[rank], -rank))
    title = f"Memory: at most {units.size(peak[most])}, on rank {most}"
    caption = "Of one attention; weights and activations of other layers are not in it."
    return Figure("memory", title, WIDTH, HEIGHT, tuple(shapes), caption=caption)


def _axis(top: float, show: Show) -> list[Shape]:
    return rules((LEFT, RIGHT), ((_height(tick, top), units.short(show(tick))) for tick in ticks(top, 4)))


def _height(value: float, top: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * value / top


def grouped(values: Sequence[float], most: int = MOST_BARS) -> list[tuple[int, int, float]]:
    """Return (first rank, last rank, largest value) for at most `most` groups of ranks."""
    runs = split_evenly(len(values), min(len(values), most)) if values else []
    return [(start, stop - 1, max(values[start:stop])) for start, stop in runs]


def _bars(
    case: Case,
    values: Sequence[float],
    top: float,
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
        y = _height(value, top)
        whom = f"rank {first}" if first == last else f"ranks {first} to {last}, at most"
        shapes.append(Rect(x, y, width, BOTTOM - y, color, shade, kind, f"{whom}: {show(value)}"))
        if side != 0 and kind != "memory-home" and i % max(1, -(-len(groups) // 16)) == 0:
            shapes.append(Label(LEFT + place * (i + 0.5), BOTTOM + 15, str(first), 12.5, anchor="middle"))
    return shapes
