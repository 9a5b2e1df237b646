"""The report on one case, or the comparison of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from weft.core import units
from weft.core.schedule import Schedule
from weft.report.bars import load_bars, memory_bars
from weft.report.case import Case, numbers, summary
from weft.report.curves import roofline, scaling_curve
from weft.report.draw import Figure
from weft.report.gantt import gantt
from weft.report.mask_figure import mask_figure, shown_heads
from weft.report.page import Report, SummaryRow, Table
from weft.report.terminal import text_gantt
from weft.report.traffic import traffic_matrix
from weft.report.verdict import sentence

MEANINGS = {
    "seconds": ("time", "until the last rank is done"),
    "compute": ("compute", "of the time, the mean rank attends or copies"),
    "exposed": ("exposed communication", "of the time, it waits for data: transfers that nothing hides"),
    "idle": ("idle", "of the time, it has nothing left or nothing yet to do"),
    "overlap": ("overlap", "of the sending, the sender computes meanwhile"),
    "imbalance": ("imbalance in time", "the busiest rank computes so many times as long as the mean"),
    "slowest": ("last rank", "is done last; the verdict names the cause"),
}
MASK_BYTES = 400_000
"""Maximum bytes of mask images, which do not compress, so that the page stays below 2 MB."""
MOST_ROWS = 64
LETTERS = "abcdefgh"


def report_cases(cases: Sequence[Case]) -> Report:
    """Return the report on one case, or the comparison of several."""
    figures, missing = draw(cases)
    names = ["trace.json"] if len(cases) == 1 else [f"trace-{letter}.json" for letter in LETTERS]
    timelines = [case.traced or case.timeline for case in cases]
    columns = [case.name for case in cases] if len(cases) > 1 else []
    models = {case.model for case in cases}
    title = " against ".join(case.name for case in cases)
    return Report(
        title=f"{models.pop()}: {title}" if len(models) == 1 and "" not in models else title,
        about=" — ".join(dict.fromkeys(map(_about, cases))),
        rows=rows(cases),
        figures=figures,
        missing=missing,
        numbers={"cases": [numbers(case) for case in cases]},
        columns=[*columns, "difference"] if len(cases) == 2 else columns,
        verdict=verdict(cases),
        tables=[table for case in cases for table in _tables(case, alone=len(cases) == 1)],
        traces=dict(zip(names, timelines, strict=False)),
        lines=[line for case in cases for line in ("", case.label, *text_gantt(case.timeline))],
    )


def _about(case: Case) -> str:
    words = [*filter(None, [case.model]), case.source]
    if where := case.topology.name if case.topology else case.timeline.topology:
        words[-1] += f" on {where}"
    machines = f" on {case.machines} machines" if case.machines > 1 else ""
    words.append(f"{case.ranks} rank{'s' * (case.ranks != 1)}{machines}")
    if case.schedule:
        problem, mask = case.schedule.attention
        sizes = f"{problem.q.size:,} tokens, {problem.heads} heads × {problem.head_dim}, {problem.dtype}"
        words += [
            sizes,
            f"mask {case.mask}, {mask.density:.0%} active" if case.mask else f"{mask.density:.0%} active",
        ]
    return " · ".join(words)


def rows(cases: Sequence[Case]) -> list[SummaryRow]:
    """Return the rows of the first table; of two cases with their difference."""
    summaries = [summary(case) for case in cases]
    table: list[SummaryRow] = []
    for name, (label, meaning) in MEANINGS.items():
        values = [one[name] for one in summaries]
        shown = [show(name, value) for value in values]
        if len(values) == 2:
            shown.append(_difference(name, *values))
        table.append(SummaryRow(label, shown, meaning, name=name))
    return table


def show(name: str, value: Any) -> str:
    """Format a number of the summary table."""
    if name == "slowest":
        return str(value[0]) if len(value) == 1 else f"{len(value)} ranks tie"
    if name == "seconds":
        return units.time(value)
    if name == "imbalance":
        return f"{value:.3f}×"
    return f"{value:.1%}"


def _difference(name: str, first: Any, second: Any) -> str:
    """Format the difference between two numbers of the summary table."""
    if name == "seconds":
        return f"{second / first - 1:+.1%}" if first else "–"
    if name == "slowest":
        return ""
    return f"{second - first:+.3f}" if name == "imbalance" else f"{100 * (second - first):+.1f} points"


def verdict(cases: Sequence[Case]) -> str:
    """Return why a case takes its time; of several also which is fastest, and why the slowest is not."""
    slowest = max(cases, key=lambda case: case.timeline.seconds)
    why = sentence(slowest.cause, slowest.timeline)
    if len(cases) == 1:
        return why
    fastest = min(cases, key=lambda case: case.timeline.seconds)
    gain = slowest.timeline.seconds / (fastest.timeline.seconds or 1.0)
    return f"{fastest.name} is {gain:.2f}× as fast as {slowest.name}. Of {slowest.name}: {why}"


def _tables(case: Case, *, alone: bool) -> list[Table]:
    """Return the tables of other plans, of the plans by layer, and of the ranks."""
    tables: list[Table] = []
    if alone and len(case.plans) > 1:
        plans = [
            [
                point.plan,
                units.time(point.seconds),
                f"{point.exposed:.1%}",
                f"{point.imbalance:.3f}",
                units.size(point.intra_bytes),
                units.size(point.inter_bytes),
                units.size(point.memory) if point.memory else "–",
            ]
            for point in case.plans
        ]
        head = ["plan", "attention", "exposed", "imbalance in time", "inside", "between", "memory"]
        tables.append(Table("Plans, the fastest first", head, plans))
    if case.explained and (layers := case.explained.layers):
        plans = [[layer.place, layer.plan, *layer.numbers, str(layer.changed)] for layer in layers]
        head = ["layer", "plan", "imbalance", "by its first plan", "gain", "changed"]
        tables.append(Table(f"Plans by layer of {case.name}", head, plans))
    timeline, memory = case.timeline, case.memory
    times = zip(*map(list, (timeline.computing, timeline.waiting, timeline.idle)), strict=True)
    ranks = [
        [
            str(rank),
            *map(units.time, three),
            units.size(int(case.traffic[rank].sum())),
            units.size(memory[rank]) if memory else "–",
        ]
        for rank, three in zip(range(min(case.ranks, MOST_ROWS)), times, strict=False)
    ]
    more = f"{case.ranks - MOST_ROWS} more in report.json." if case.ranks > MOST_ROWS else ""
    head = ["rank", "compute", "exposed", "idle", "sent", "memory"]
    return [*tables, Table(f"Ranks of {case.name}", head, ranks, is_open=False, note=more)]


def draw(cases: Sequence[Case]) -> tuple[list[Figure], list[str]]:
    """Return the figures that can be drawn, and for each other one what it lacks."""
    own = [_own(case) for case in cases]
    lacks = [missing for _, missing in own]
    if len(cases) == 1:
        return [gantt(cases), *own[0][0], *_of_the_cluster(cases, lacks[0])], lacks[0]
    kinds = [{_kind(figure) for figure in figures} for figures, _ in own]
    shared = set.intersection(*kinds)
    figures = [gantt(cases)]
    # Figures that all cases have come first, kind by kind beside each other; then those of one case.
    for kind in sorted(set.union(*kinds), key=lambda kind: (kind not in shared, KINDS.index(kind))):
        for case, letter, (some, _) in zip(cases, LETTERS, own, strict=False):
            side = letter if kind in shared and len(cases) == 2 else ""
            figures += [_of(figure, case, letter, side) for figure in some if _kind(figure) == kind]
    if len({(case.topology, case.schedule and case.schedule.attention) for case in cases}) == 1:
        return figures + _of_the_cluster(cases, lacks[0]), lacks[0]
    for case, letter, missing in zip(cases, LETTERS, lacks, strict=False):
        figures += [_of(figure, case, letter, "") for figure in _of_the_cluster([case], missing)]
    if all(missing == lacks[0] for missing in lacks):
        return figures, lacks[0]
    return figures, [
        f"{case.name}: {', '.join(some)}" for case, some in zip(cases, lacks, strict=True) if some
    ]


KINDS = ("mask", "loads", "traffic", "memory")


def _kind(figure: Figure) -> str:
    return figure.name.partition("-")[0]


def _of(figure: Figure, case: Case, letter: str, side: str) -> Figure:
    group = figure.group and f"{figure.group}-{letter}"
    name, title = f"{figure.name}-{letter}", f"{case.name} · {figure.title}"
    return replace(figure, name=name, title=title, group=group, side=side)


def _own(case: Case) -> tuple[list[Figure], list[str]]:
    """Return the figures of one plan, and for each that cannot be drawn what it lacks."""
    figures = [*_masks(case, case.schedule)] if case.schedule else []
    missing = [] if case.schedule else ["masks and the roofline (they need schedule.json beside the trace)"]
    figures += [load_bars(case), traffic_matrix(case)]
    if case.memory:
        figures.append(memory_bars(case))
    else:
        missing.append("memory (it is not in the trace)")
    return figures, missing


def _of_the_cluster(cases: Sequence[Case], missing: list[str]) -> list[Figure]:
    """Return the figures that all plans of one attention on one cluster share; note what is missing."""
    case, figures = cases[0], list[Figure]()
    if len({point.gpus for point in case.scaling if point.seconds}) > 1:
        figures.append(scaling_curve(case.scaling, case.name if len(cases) == 1 else ""))
    else:
        missing.append("the scaling curve (it needs a simulated cluster of several GPUs)")
    if case.schedule and case.topology and case.traffic.any():
        figures.append(roofline(cases, case.topology))
    elif case.schedule:
        missing.append("the roofline (it needs --topology, and something that is sent)")
    return figures


def _masks(case: Case, schedule: Schedule) -> list[Figure]:
    """Return the mask figures of as many heads as the page has room for."""
    figures: list[Figure] = []
    for head in shown_heads(schedule):
        figures.append(mask_figure(case, schedule, head))
        if sum(len(figure.svg(alone=False)) for figure in figures) > MASK_BYTES:
            break
    return figures
