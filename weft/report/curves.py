"""Scaling curve (time over devices) and roofline (speed over FLOP per byte sent)."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from weft.core import units
from weft.core.topology import Topology
from weft.report.case import Case
from weft.report.draw import Dot, Figure, Label, Polyline, Shape, rules
from weft.report.palette import EIGHT
from weft.report.sweep import SweepPoint

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 480.0, 62.0, 464.0, 14.0, 206.0
Put = Callable[[float], float]
LEGEND, LINE = BOTTOM + 52, 17.0


def scaling_curve(points: Sequence[SweepPoint]) -> Figure:
    """Draw the fastest plan at each size, each family of plans, and perfect scaling."""
    best = {
        gpus: min(p.seconds for p in points if p.gpus == gpus) for gpus in sorted({p.gpus for p in points})
    }
    sizes = list(best)
    ideal = {gpus: best[sizes[0]] * sizes[0] / gpus for gpus in sizes}
    low = min(*best.values(), *ideal.values()) / 1.3
    high = max(p.seconds for p in points) * 1.3
    x, y = (
        log_scale((sizes[0], max(sizes[-1], 2 * sizes[0])), (LEFT + 26, RIGHT - 24)),
        log_scale((low, high), (BOTTOM, TOP)),
    )
    shapes: list[Shape] = rules(
        (LEFT, RIGHT), ((y(t), units.short(units.time(t))) for t in decades(low, high, y))
    )
    shapes += [Label(x(gpus), BOTTOM + 15, str(gpus), 12.5, anchor="middle") for gpus in sizes]
    shapes.append(Label(RIGHT, BOTTOM + 29, "GPUs", 12.5, anchor="end"))
    shapes.append(
        Polyline(tuple((x(g), y(s)) for g, s in ideal.items()), "muted", 1, dashed=True, kind="ideal")
    )
    entries = [("muted", "perfect")]
    families = _families(points)
    for i, (family, times) in enumerate(families.items()):
        shapes.append(Polyline(tuple((x(g), y(s)) for g, s in times.items()), f"c{i}", 1.2, kind="family"))
        shapes += [Dot(x(g), y(s), f"c{i}", 2.5, tip=f"{family}: {units.time(s)}") for g, s in times.items()]
        entries.append((f"c{i}", family))
    shapes.append(Polyline(tuple((x(g), y(s)) for g, s in best.items()), "ink", 2.2, kind="best"))
    for gpus, seconds in best.items():
        shapes.append(Dot(x(gpus), y(seconds), "ink", 3.5, "scaling", f"{gpus} GPUs: {units.time(seconds)}"))
        share = best[sizes[0]] * sizes[0] / (gpus * seconds)
        shapes.append(Label(x(gpus), y(seconds) - 9, f"{share:.0%}", 12.5, "ink", "middle"))
    entries.append(("ink", "fastest, with its efficiency"))
    speed = best[sizes[0]] / best[sizes[-1]]
    title = f"Scaling: {sizes[-1]} GPUs are {speed:.2f}× as fast as {sizes[0]}"
    shapes += _legend(entries)
    return Figure(
        "scaling",
        title,
        WIDTH,
        _bottom(len(entries)),
        tuple(shapes),
        caption="Simulated; time of one attention.",
    )


def _families(points: Sequence[SweepPoint]) -> dict[str, dict[int, float]]:
    """Return per family of plans the fastest time at each device count; empty if one curve suffices."""
    families: dict[str, dict[int, float]] = {}
    for p in sorted(points, key=lambda p: p.gpus):
        times = families.setdefault(re.sub(r":\d+x\d+", "", p.plan), {})
        times[p.gpus] = min(p.seconds, times.get(p.gpus, math.inf))
    if max(map(len, families.values())) == 1 or len(points) == len({p.gpus for p in points}):
        return {}
    by_speed = sorted(families.items(), key=lambda item: (min(item[1].values()), item[0]))
    return dict(by_speed[: EIGHT - 1])


def roofline(case: Case, topology: Topology) -> Figure:
    """Draw each plan at its FLOP per byte sent and its FLOP/s, below the roofs of the cluster."""
    points = _plan_points(case, topology)
    ridge = topology.flops / topology.intra.bandwidth
    right = 4 * max([ridge, topology.flops / topology.inter.bandwidth, *(p[1] for p in points)])
    left = min([ridge, *(p[1] for p in points)]) / 4
    low, high = min(p[2] for p in points) / 2, topology.flops * 1.6
    x, y = log_scale((left, right), (LEFT, RIGHT)), log_scale((low, high), (BOTTOM, TOP))
    shapes: list[Shape] = rules(
        (LEFT, RIGHT), ((y(t), units.short(units.count(t))) for t in decades(low, high, y))
    )
    shapes += [
        Label(x(t), BOTTOM + 15, units.short(units.count(t)), 12.5, anchor="middle")
        for t in decades(left, right, x, wanted=1, apart=48)
    ]
    shapes.append(Label(RIGHT, BOTTOM + 29, "FLOP for each byte sent", 12.5, anchor="end"))
    shapes.append(Label(LEFT, BOTTOM + 29, "FLOP/s of a GPU", 12.5))
    shapes += _roofs(topology, x, y, (left, low))
    for i, (name, dense, speed) in reversed(list(enumerate(points))):
        tip = f"{name}: {units.count(speed)}FLOP/s, {units.count(dense)} FLOP/B"
        shapes.append(Dot(x(dense), y(speed), f"c{i}", 5, "plan", tip))
    shapes += _legend([(f"c{i}", name) for i, (name, _, _) in enumerate(points)])
    share = points[0][2] / topology.flops
    title = f"Communication roofline: {points[0][0]} reaches {share:.0%} of a GPU's attention speed"
    return Figure("roofline", title, WIDTH, _bottom(len(points)), tuple(shapes), caption=_NOTE)


_NOTE = (
    "A plan's bytes are those of the link that is busy longest. Left of that roof's corner, "
    "sending takes longer than computing."
)


def _roofs(topology: Topology, x: Put, y: Put, corner: tuple[float, float]) -> list[Shape]:
    """Return the roofs: peak FLOP/s of a device and the bandwidth of each kind of link."""
    top = topology.flops
    links = [("inside a machine", topology.intra), ("between machines", topology.inter)]
    lines: list[Shape] = []
    for i, (name, link) in enumerate(links[: 1 + (topology.machines > 1)]):
        start, stop = max(corner[0], corner[1] / link.bandwidth), top / link.bandwidth
        ends = (x(start), y(start * link.bandwidth)), (x(stop), y(top))
        lines.append(Polyline(ends, "muted", 1.2, dashed=i > 0, kind="roof"))
        side = (x(stop) + 4, "start") if x(stop) < RIGHT - 110 else (RIGHT, "end")
        lines.append(Label(side[0], y(top) + 15 + 14 * i, name, 12, anchor=side[1]))
    flat = min(top / link.bandwidth for _, link in links)
    lines.append(Polyline(((x(flat), y(top)), (RIGHT, y(top))), "ink", 1.4, kind="roof"))
    lines.append(Label(RIGHT, y(top) - 5, f"{units.count(top)}FLOP/s", 12, anchor="end"))
    return lines


def _plan_points(case: Case, topology: Topology) -> list[tuple[str, float, float]]:
    """Return (name, FLOP per byte on the busiest link, FLOP/s per device); the case itself first."""
    here = SweepPoint.of(case.name, topology, case.timeline)
    own = case.schedule.name if case.schedule else case.name
    others = [point for point in case.plans if point.plan != own]
    points: list[tuple[str, float, float]] = []
    for point in (here, *others)[:EIGHT]:
        inside, between = point.intra_bytes, point.inter_bytes
        longest = (
            between if between / topology.inter.bandwidth > inside / topology.intra.bandwidth else inside
        )
        points.append((point.plan, case.flops / max(1, longest), case.flops / case.ranks / point.seconds))
    return points


def _legend(entries: Sequence[tuple[str, str]]) -> list[Shape]:
    shapes: list[Shape] = []
    for i, (color, text) in enumerate(entries):
        x, y = LEFT + 206 * (i % 2), LEGEND + LINE * (i // 2)
        shapes += [Dot(x, y - 4, color, 4), Label(x + 10, y, text, 12.5)]
    return shapes


def _bottom(entries: int) -> float:
    return LEGEND + LINE * (-(-entries // 2) - 1) + 8


def log_scale(data: tuple[float, float], place: tuple[float, float]) -> Put:
    """Map a number from one interval to another on a logarithmic scale."""
    low, high = map(math.log, data)

    def put(value: float) -> float:
        return place[0] + (place[1] - place[0]) * (math.log(value) - low) / ((high - low) or 1.0)

    return put


def decades(low: float, high: float, put: Put, *, wanted: int = 3, apart: float = 20) -> list[float]:
    """Return round numbers between two bounds: 1 per decade, also 2 and 5 if there are few decades."""
    ticks: list[float] = []
    powers = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        ticks = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
        if len(ticks) >= wanted:
            break
    shown: list[float] = []
    for tick in ticks:
        if not shown or abs(put(tick) - put(shown[-1])) >= apart:
            shown.append(tick)
    return shown
