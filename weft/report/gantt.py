"""Gantt chart: one row per rank, compute lane above, send lane below, waits hatched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from weft.core import units
from weft.core.timeline import Span
from weft.report.case import Case, summary
from weft.report.draw import Figure, Label, Polyline, Rect, Shape
from weft.report.frame import Symbol, legend, ticks
from weft.report.palette import on_color, rank_color

WIDTH, LEFT, RIGHT = 960.0, 64.0, 948.0
UPPER, LOWER, GAP = 15.0, 8.0, 6.0
MOST_RANKS = 16
MOST_BARS = 4000
"""Maximum bars per lane; beyond it, short neighbors of one kind are merged into one bar."""


APART = 10.0
"""Two timelines whose lengths differ by more than this factor get separate axes."""


def gantt(cases: Sequence[Case]) -> Figure:
    """Draw one timeline, or several below each other on one time axis if their lengths are similar."""
    y, shapes = 8.0, list[Shape]()
    for group in [cases] if _one_axis(cases) else [[case] for case in cases]:
        y, some = _chart(group, y, named=len(cases) > 1, most=MOST_BARS // len(cases))
        shapes += some
    shapes += legend(LEGEND, y + 6, WIDTH, LEFT, 11)[0]
    return Figure("timeline", _title(cases), WIDTH, y + 16, tuple(shapes), caption=_caption(cases), wide=True)


def _one_axis(cases: Sequence[Case]) -> bool:
    took = [case.timeline.seconds for case in cases]
    return max(took) <= APART * min(took)


def _chart(cases: Sequence[Case], y: float, *, named: bool, most: int) -> tuple[float, list[Shape]]:
    """Draw timelines from a height downwards, then their axis; return the shapes and the next height."""
    seconds = max(case.timeline.seconds for case in cases) or 1.0
    scale = (RIGHT - LEFT) / seconds
    top, shapes = y - 4, list[Shape]()
    for case in cases:
        if named:
            shapes.append(
                Label(LEFT, y + 10, f"{case.name} · {units.time(case.timeline.seconds)}", 12, "ink")
            )
            y += 18
        lanes = {rank: y + place * (UPPER + LOWER + GAP) for place, rank in enumerate(shown_ranks(case))}
        shapes += _rows(case, lanes, scale, most)
        y = max(lanes.values()) + UPPER + LOWER + GAP + 4
    axis: list[Shape] = []
    for tick in ticks(seconds, 8):
        x = LEFT + tick * scale
        axis.append(Polyline(((x, top), (x, y)), "rule"))
        anchor = "middle" if x < RIGHT - 20 else "end"
        axis.append(Label(x, y + 14, units.short(units.time(tick)), 11, anchor=anchor))
    return y + 30, [*axis, *shapes]


def shown_ranks(case: Case) -> list[int]:
    """Return all ranks, or a selection: the slowest, those at the end of the critical path, and others."""
    if case.ranks <= MOST_RANKS:
        return list(range(case.ranks))
    asked = [*blamed(case), case.timeline.slowest, *(span.rank for span in reversed(case.path))]
    chosen = set(list(dict.fromkeys(asked))[: MOST_RANKS // 2])
    step = case.ranks // MOST_RANKS
    for rank in (*range(0, case.ranks, step), *range(case.ranks)):
        if len(chosen) < MOST_RANKS:
            chosen.add(rank)
    return sorted(chosen)


def blamed(case: Case) -> set[int]:
    """Return the ranks that the verdict names, whose labels are bold."""
    return {rank for rank in (case.cause.rank, *(case.cause.link or ())) if rank is not None}


@dataclass(frozen=True)
class Bar:
    """A span, or consecutive spans too short to draw apart, represented by the longest."""

    span: Span
    start: float
    end: float
    spans: int
    attends: int


def bars(spans: Sequence[Span], gap: float) -> list[Bar]:
    """Merge the spans of one lane, in order of their starts, if they are closer than `gap` seconds."""
    groups: list[list[Span]] = []
    for span in spans:
        if groups and span.end - groups[-1][0].start <= gap:
            groups[-1].append(span)
        else:
            groups.append([span])
    return [_bar_of(group) for group in groups]


def _bar_of(group: list[Span]) -> Bar:
    took: dict[str, float] = {}
    for span in group:
        took[span.kind] = took.get(span.kind, 0.0) + span.seconds
    kind = max(took, key=lambda kind: took[kind])
    shown = next(span for span in group if span.kind == kind)
    attends = sum(span.kind == "attend" for span in group)
    return Bar(shown, group[0].start, max(span.end for span in group), len(group), attends)


def _rows(case: Case, lanes: dict[int, float], scale: float, most: int) -> list[Shape]:
    def joined(gap: float) -> dict[int, list[Bar]]:
        return {
            rank: [
                bar
                for lane in ("compute", "comm")
                for bar in bars([s for s in case.timeline.of(rank) if s.lane == lane], gap)
            ]
            for rank in lanes
        }

    gap = 0.5 / scale
    rows = joined(gap)
    while sum(map(len, rows.values())) > most and gap * scale < WIDTH:
        gap *= 2
        rows = joined(gap)
    shapes: list[Shape] = []
    for rank, y in lanes.items():
        bold = rank in blamed(case)
        color = "ink" if bold else "muted"
        shapes.append(Label(LEFT - 8, y + 12, f"rank {rank}", 11, color, "end", bold=bold))
        hops = 0
        for bar in rows[rank]:
            hops += bar.attends
            shapes += _bar(case, bar, y, scale, hops)
    return shapes + _outline(case, lanes, scale, gap)


def _bar(case: Case, bar: Bar, y: float, scale: float, hop: int) -> list[Shape]:
    span = bar.span
    x, width = LEFT + bar.start * scale, max(0.3, (bar.end - bar.start) * scale)
    color, strength = rank_color(span.rank, case.ranks, case.machines)
    tip = f"rank {span.rank}: {span.name or span.kind}, {units.time(bar.end - bar.start)}"
    tip += f" from {units.time(bar.start)}" + (f", {bar.spans} spans" if bar.spans > 1 else "")
    if span.kind == "send":
        tip += f" → rank {span.peer}, {units.size(span.num_bytes)}" if bar.spans == 1 else ""
        return [Rect(x, y + UPPER, width, LOWER, color, 0.5 * strength, "send", tip)]
    top, height = (y, UPPER) if span.lane == "compute" else (y + UPPER, LOWER)
    if span.kind in ("wait", "barrier", "launch"):
        return [Rect(x, top, width, height, kind=span.kind, tip=tip, hatched=True)]
    faint = 0.65 if span.kind == "copy" else 1.0
    shapes: list[Shape] = [Rect(x, top, width, height, color, faint * strength, span.kind, tip)]
    if span.kind == "attend" and bar.spans == 1 and width > 16:
        shapes.append(Label(x + width / 2, y + 11, str(hop), 9, on_color(color, strength), "middle"))
    return shapes


def _outline(case: Case, lanes: dict[int, float], scale: float, gap: float) -> list[Shape]:
    """Draw the critical path: a frame around each span, and lines between ranks."""
    shapes: list[Shape] = []
    before: tuple[float, float] | None = None
    for (rank, lane), spans in groupby(case.path, key=lambda span: (span.rank, span.lane)):
        some = bars(list(spans), 4 * gap)
        if rank not in lanes:
            before = None
            continue
        top, height = (0.0, UPPER) if lane == "compute" else (UPPER, LOWER)
        y = lanes[rank] + top
        for bar in some:
            x, end = LEFT + bar.start * scale, LEFT + bar.end * scale
            if before:
                shapes.append(Polyline((before, (x, y + height / 2)), "ink", 1.2, kind="path-hop"))
            shapes.append(Rect(x, y, max(end - x, 0.5), height, "", kind="path", outline="ink"))
            before = (end, y + height / 2)
    return shapes


LEGEND: tuple[tuple[Symbol, str], ...] = (
    (Rect(0, 0, 22, 10, "c1"), "attends"),
    (Rect(0, 0, 22, 10, "c1", 0.65), "copies"),
    (Rect(0, 0, 22, 8, "c1", 0.5), "sends, below"),
    (Rect(0, 0, 22, 10, hatched=True), "waits for data: exposed"),
    (Rect(0, 0, 22, 10, "", outline="ink"), "critical path"),
)


def _title(cases: Sequence[Case]) -> str:
    if len(cases) > 1:
        fast, *_, slow = sorted(cases, key=lambda case: case.timeline.seconds)
        more = slow.timeline.seconds / (fast.timeline.seconds or 1.0)
        axes = "on one axis" if _one_axis(cases) else "each on its own axis"
        return f"Timelines {axes}: {fast.name} is {more:.2f}× as fast as {slow.name}"
    return f"Timeline: {units.time(cases[0].timeline.seconds)}, {summary(cases[0])['exposed']:.1%} waiting"


def _caption(cases: Sequence[Case]) -> str:
    many = max(case.ranks for case in cases)
    some = (
        f" {MOST_RANKS} of {many} ranks are drawn, among them the slowest and those of the critical path."
        if many > MOST_RANKS
        else ""
    )
    shown = "; ".join(dict.fromkeys(case.calls for case in cases))
    return f"{' and '.join(sorted({case.source for case in cases})).capitalize()}; {shown}.{some}"
