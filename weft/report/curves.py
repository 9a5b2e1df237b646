"""Scaling curve (time over devices) and roofline (speed over FLOP per byte sent)."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from weft.core import units
from weft.core.topology import Topology
from weft.report.case import Case
from weft.report.draw import Dot, Figure, Label, Polyline, Shape
from weft.report.frame import HALF, LEFT, MARGIN, Chart, Scale, Symbol
from weft.report.sweep import SweepPoint

RIGHT, TOP, BOTTOM = HALF - MARGIN, 26.0, 206.0


def scaling_curve(points: Sequence[SweepPoint], name: str = "") -> Figure:
    """Draw the fastest plan at each size, each family of plans, the plan `name`, and perfect scaling."""
    fastest = {p.gpus: p for p in sorted(points, key=lambda p: -p.seconds)}
    best = {gpus: fastest[gpus].seconds for gpus in sorted(fastest)}
    sizes = list(best)
    ideal = {gpus: best[sizes[0]] * sizes[0] / gpus for gpus in sizes}
    low = min(*best.values(), *ideal.values()) / 1.3
    high = max(p.seconds for p in points) * 1.3
    across = Scale(sizes[0], max(sizes[-1], 2 * sizes[0]), LEFT + 26, RIGHT - 24, logs=True)
    chart = Chart(across, Scale(low, high, BOTTOM, TOP, logs=True))
    shapes = chart.rows(lambda t: units.short(units.time(t)), chart.y.ticks(3), "time")
    shapes += chart.columns(str, sizes, "GPUs")
    shapes.append(chart.line(ideal.items(), "muted", 1, dashed=True, kind="ideal"))
    entries: list[tuple[Symbol, str]] = [("muted", "perfect")]
    for (family, times), color in zip(_families(points).items(), PLANS, strict=False):
        shapes.append(chart.line(times.items(), color, 1.2, kind="family"))
        for g, s in times.items():
            shapes.append(Dot(chart.x(g), chart.y(s), color, 2.5, tip=f"{family}: {units.time(s)}"))
        entries.append((color, family))
    shapes.append(chart.line(best.items(), "ink", 2.2, kind="best"))
    for gpus, seconds in best.items():
        place = chart.x(gpus), chart.y(seconds)
        share = best[sizes[0]] * sizes[0] / (gpus * seconds)
        tip = f"{fastest[gpus].plan} on {gpus} GPUs: {units.time(seconds)}"
        shapes.append(Dot(*place, "ink", 3.5, "scaling", tip))
        shapes.append(Label(place[0], place[1] - 9, f"{share:.0%}", color="ink", anchor="middle"))
    entries.append(("ink", "fastest plan, with its efficiency"))
    for p in points:
        if p.plan == name and fastest[p.gpus].plan != name:
            shapes.append(
                Dot(
                    chart.x(p.gpus),
                    chart.y(p.seconds),
                    "alarm",
                    4.5,
                    "own",
                    f"{name}: {units.time(p.seconds)}",
                )
            )
            entries.append(("alarm", f"{name}, of this report"))
    speed = best[sizes[0]] / best[sizes[-1]]
    title = f"Scaling: {sizes[-1]} GPUs are {speed:.2f}× as fast as {sizes[0]}, each with its fastest plan"
    plans = ", ".join(f"{gpus}: {fastest[gpus].plan}" for gpus in sizes)
    caption = f"Simulated; time of one attention. Fastest on {plans}."
    return chart.figure("scaling", title, shapes, entries, caption=caption)


PLANS = ("c5", "c2", "c6", "c4", "c0", "c1", "c7")
"""Colors of plans; ranks have theirs in another order."""


def _families(points: Sequence[SweepPoint]) -> dict[str, dict[int, float]]:
    """Return per family of plans the fastest time at each device count; empty if one curve suffices."""
    families: dict[str, dict[int, float]] = {}
    for p in sorted(points, key=lambda p: p.gpus):
        times = families.setdefault(re.sub(r":\d+x\d+", "", p.plan), {})
        times[p.gpus] = min(p.seconds, times.get(p.gpus, math.inf))
    if max(map(len, families.values())) == 1 or len(points) == len({p.gpus for p in points}):
        return {}
    by_speed = sorted(families.items(), key=lambda item: (min(item[1].values()), item[0]))
    return dict(by_speed[: len(PLANS)])


def roofline(cases: Sequence[Case], topology: Topology) -> Figure:
    """Draw each plan at its FLOP per byte sent and its FLOP/s, below the roofs of the cluster."""
    points = _plan_points(cases, topology)
    ridge = topology.flops / topology.intra.bandwidth
    right = 4 * max([ridge, topology.flops / topology.inter.bandwidth, *(p[1] for p in points)])
    left = min([ridge, *(p[1] for p in points)]) / 4
    low = min(p[2] for p in points) / 2
    chart = Chart(
        Scale(left, right, LEFT, RIGHT, logs=True), Scale(low, topology.flops * 1.6, BOTTOM, TOP, logs=True)
    )

    def count(value: float) -> str:
        return units.short(units.count(value))

    shapes = chart.rows(count, chart.y.ticks(3), "FLOP/s of a GPU")
    shapes += chart.columns(count, chart.x.ticks(1, apart=48), "FLOP for each byte sent")
    shapes += _roofs(topology, chart)
    entries: list[tuple[Symbol, str]] = []
    for color, (name, dense, speed) in zip(("ink", *PLANS), points, strict=False):
        tip = f"{name}: {units.count(speed)}FLOP/s, {units.count(dense)} FLOP/B"
        shapes.append(Dot(chart.x(dense), chart.y(speed), color, 5, "plan", tip))
        entries.append((color, name))
    share = points[0][2] / topology.flops
    title = f"Communication roofline: {points[0][0]} reaches {share:.0%} of a GPU's attention speed"
    return chart.figure("roofline", title, shapes, entries, caption=_NOTE)


_NOTE = (
    "A plan's bytes are those of the link that is busy longest. Left of that roof's corner, "
    "sending takes longer than computing."
)


def _roofs(topology: Topology, chart: Chart) -> list[Shape]:
    """Return the roofs: peak FLOP/s of a device and the bandwidth of each kind of link."""
    top, x, y = topology.flops, chart.x, chart.y
    links = [("inside a machine", topology.intra), ("between machines", topology.inter)]
    lines: list[Shape] = []
    for i, (name, link) in enumerate(links[: 1 + (topology.machines > 1)]):
        start, stop = max(x.low, y.low / link.bandwidth), top / link.bandwidth
        ends = (start, start * link.bandwidth), (stop, top)
        lines.append(chart.line(ends, "muted", 1.2, dashed=i > 0, kind="roof"))
        side = (x(stop) + 4, "start") if x(stop) < RIGHT - 110 else (RIGHT, "end")
        lines.append(Label(side[0], y(top) + 15 + 14 * i, name, 12, anchor=side[1]))
    flat = min(top / link.bandwidth for _, link in links)
    lines.append(Polyline(((x(flat), y(top)), (RIGHT, y(top))), "ink", 1.4, kind="roof"))
    lines.append(Label(RIGHT, y(top) - 5, f"{units.count(top)}FLOP/s", 12, anchor="end"))
    return lines


def _plan_points(cases: Sequence[Case], topology: Topology) -> list[tuple[str, float, float]]:
    """Return (name, FLOP per byte on the busiest link, FLOP/s per device); the cases themselves first."""
    flops, ranks = cases[0].flops, cases[0].ranks
    own = {case.schedule.name if case.schedule else case.name for case in cases}
    drawn = [SweepPoint.of(case.name, topology, case.timeline) for case in cases]
    drawn += [point for point in cases[0].plans if point.plan not in own]
    points: list[tuple[str, float, float]] = []
    for point in drawn[: len(PLANS) + 1]:
        inside, between = point.intra_bytes, point.inter_bytes
        longest = (
            between if between / topology.inter.bandwidth > inside / topology.intra.bandwidth else inside
        )
        points.append((point.plan, flops / max(1, longest), flops / ranks / point.seconds))
    return points
