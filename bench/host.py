"""Work of the host for one attention, beside commit 45b0107: CPU time, kernel launches, messages, lowering.

    python -m bench.host [--quick] [--json FILE]

Wan2.1-14B at 720p on meta tensors, over a transport that moves nothing: what is timed is Python and torch's
dispatch, on one core. Both trees run the same functions of this file, in processes of their own and in
alternating rounds; ratios are medians over the rounds. Launches are those of a GPU besides attention, on the
rank that has most: copies are fused there, which meta tensors are not timed with.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple

import torch
from rich.progress import Progress

from bench.all import ROOT
from bench.dry import HEADS, DryRun, Launches, fused_launches, schedule_of
from bench.rows import Line, Results, Row, main, median_ratio
from bench.worker import BASE, TreeWorker, base_worker
from weft.core.mask import BlockMask
from weft.core.schedule import Schedule
from weft.masks.random import random_mask
from weft.schedule.reverse import reverse
from weft.simulate.clusters import cluster

RUNS, ROUNDS, QUICK_ROUNDS = 40, 25, 9
SIMULATIONS = 3
NO_SLOWER = 1.05
"""Two runs of the same code differ by less, as in bench.against."""
GROWTH = 2.3
"""Times the CPU time of lowering, for twice the operations."""
TINY = (1, 2, 16, 8)


class HostCase(NamedTuple):
    """A plan, the most of 45b0107's time that it may take, and the most launches; 0 for no bar."""

    name: str
    ranks: int
    nodes: str = ""
    ratio: float = 0.0
    launches: int = 0

    def __str__(self) -> str:
        return f"{self.name} on {self.nodes or self.ranks}"


CASES = (
    HostCase("usp:2x4", 8, "", 0.5, 7),
    HostCase("ulysses", 8, "", 0.35, 6),
    HostCase("torus:8x4", 32, "4x8xh100", 0.4, 36),
    HostCase("ring", 8),
)
FAMILIES = {
    "ring": [("ring", ranks, "") for ranks in (64, 128, 256)],
    "usp:8xR": [(f"usp:8x{ring}", 8 * ring, "") for ring in (8, 16, 32)],
    "torus:8xR": [(f"torus:8x{nodes}", 8 * nodes, f"{nodes}x8xh100") for nodes in (2, 4, 8)],
}
"""Names, ranks and clusters, from small to large."""


# In a worker, of either tree.


def seconds_of(function: Callable[[], object], runs: int) -> float:
    """CPU seconds of one call: what others do on the machine is not the question."""
    gc.collect()
    gc.disable()
    try:
        began = time.process_time()
        for _ in range(runs):
            function()
        return (time.process_time() - began) / runs
    finally:
        gc.enable()


@cache
def _dry_run(name: str, ranks: int, nodes: str, rank: int) -> DryRun:
    run = DryRun(_schedule(name, ranks, nodes), rank)
    for _ in range(3):
        run.forward()
    return run


@cache
def _schedule(name: str, ranks: int, nodes: str) -> Schedule:
    return schedule_of(name, ranks, nodes)


def forward_seconds(name: str, ranks: int, nodes: str, rank: int) -> float:
    return seconds_of(_dry_run(name, ranks, nodes, rank).forward, RUNS)


def counts(name: str, ranks: int, nodes: str, chosen: list[int]) -> list[tuple[int, int]]:
    """Launches and transport calls of one warm forward on a GPU, for each of the chosen ranks."""
    sizes: list[tuple[int, int]] = []
    with fused_launches() as fused:
        for rank in chosen:
            run = DryRun(_schedule(name, ranks, nodes), rank)
            run.forward()
            run.transport.calls = 0
            fused.clear()
            with Launches() as launches:
                run.forward()
            sizes.append((len(launches.names) + len(fused), run.transport.calls))
    return sizes


def attention_seconds() -> float:
    """One warm call of the public function in a world of one process, on tensors that take no time."""
    from weft.run.attention import attention

    torch.manual_seed(0)
    q, k, v = (torch.randn(TINY) for _ in range(3))
    with torch.inference_mode():
        for _ in range(3):
            attention(q, k, v, plan="ring", tokens=TINY[2])
        return seconds_of(lambda: attention(q, k, v, plan="ring", tokens=TINY[2]), 10 * RUNS)


@cache
def _large(ring: int) -> tuple[Schedule, dict[int, int]]:
    from weft.schedule.measure import attend_works

    tokens = 256 * 8 * ring
    mask = random_mask(HEADS, tokens, tokens, block=128, density=0.25)
    schedule = schedule_of(f"usp:8x{ring}", 8 * ring, mask=mask)
    return schedule, attend_works(schedule)


def simulate_seconds(ring: int) -> float:
    from weft.simulate.events import simulate

    schedule, works = _large(ring)
    topology = cluster(f"{ring}x8xh100")
    return seconds_of(lambda: simulate(schedule, topology, works, memory=False), 1)


# In this tree only.


def lowering(family: str, *, quick: bool) -> dict[str, list[tuple[int, int, float]]]:
    """By direction and from small to large: operations, steps of one rank, CPU seconds to lower it."""
    from weft.program.lower import lower

    times: dict[str, list[tuple[int, int, float]]] = {"forward": [], "backward": []}
    for name, ranks, nodes in FAMILIES[family][: 2 if quick else 3]:
        forward = schedule_of(name, ranks, nodes, BlockMask.dense(64, 256 * ranks))
        for direction, schedule in (("forward", forward), ("backward", reverse(forward))):
            steps = len(lower(schedule, 3).steps)
            # The same work each time: whatever takes longer was disturbed.
            taken = min(seconds_of(lambda schedule=schedule: lower(schedule, 3), 1) for _ in range(7))
            times[direction].append((len(schedule.ops), steps, taken))
    return times


def growth(points: Sequence[tuple[float, float]]) -> float:
    """Given (size, seconds): the largest factor between neighbours by which twice the size takes longer."""
    pairs = zip(points, points[1:], strict=False)
    return max(2 ** (math.log(b[1] / a[1]) / math.log(b[0] / a[0])) for a, b in pairs)


# Rows.


class Rounds(NamedTuple):
    """Seconds of each round, here and there; nothing there if git does not have the commit."""

    here: list[float]
    there: list[float]

    @property
    def ratio(self) -> float | None:
        return median_ratio(self.here, self.there) if self.there else None


def alternate(here: TreeWorker, there: TreeWorker | None, rounds: int, function: str, *values: Any) -> Rounds:
    """Call a function of this file in turn in both trees; each goes first in every second round."""
    timings = Rounds([], [])
    sides = [(here, timings.here), *([(there, timings.there)] if there else [])]
    for number in range(rounds):
        for worker, seconds in sides if number % 2 else sides[::-1]:
            seconds.append(worker.call(f"bench.host:{function}", *values))
    return timings


def time_row(case: str, rounds: Rounds, most: float, unit: str = "ms") -> Row:
    """The median time of both, and whether the median of the ratios keeps the bar; most = 0: none."""
    scale = {"s": 1.0, "ms": 1e3, "µs": 1e6}[unit]
    ratio = rounds.ratio
    reached = f", is {ratio:.2f}" if ratio is not None else ""
    return Row(
        case=case,
        measured=median(rounds.here) * scale,
        unit=unit,
        peer=median(rounds.there) * scale if rounds.there else None,
        peer_name=BASE if rounds.there else "",
        bar=f"≤ {most:g} × {BASE}{reached}" if most else f"for information{reached}",
        holds=not most or ratio is None or ratio <= most,
    )


def count_row(case: str, unit: str, here: int, there: int | None, most: int) -> Row:
    return Row(
        case=case,
        measured=here,
        unit=unit,
        peer=there,
        peer_name="" if there is None else BASE,
        bar=f"≤ {most}" if most else "for information",
        holds=not most or here <= most,
    )


def growth_rows(
    family: str, direction: str, points: Sequence[tuple[int, int, float]]
) -> tuple[list[Row], Line]:
    """Growth by the operations of the schedule, all of which are read, and by the steps that are written."""
    case = f"lower one rank of {family}, {direction}"
    rows: list[Row] = []
    for size, what in enumerate(("operations of the schedule", "steps of the rank")):
        measured = growth([(point[size], point[2]) for point in points])
        bar, holds = f"≤ {GROWTH} × the CPU time", measured <= GROWTH
        rows.append(Row(case=f"{case}, twice the {what}", measured=measured, unit="×", bar=bar, holds=holds))
    times = ", ".join(f"{ops:,} → {steps:,} in {taken * 1e3:.1f} ms" for ops, steps, taken in points)
    return rows, Line(case=case, name="operations → steps", note=times)


def forward_rows(case: HostCase, here: TreeWorker, there: TreeWorker | None, rounds: int) -> list[Row]:
    plan = (case.name, case.ranks, case.nodes)
    everyone = list(range(case.ranks))
    by_rank = here.call("bench.host:counts", *plan, everyone)
    worst = max(everyone, key=lambda rank: by_rank[rank])
    # There an executor compiles both directions first, so one rank stands for all: the worst one here.
    ((launches, calls),) = there.call("bench.host:counts", *plan, [worst]) if there else [(None, None)]
    timed = alternate(here, there, rounds, "forward_seconds", *plan, worst)
    most = [max(column) for column in zip(*by_rank, strict=True)]
    return [
        time_row(f"{case}, forward, CPU time", timed, case.ratio),
        count_row(f"{case}, forward, launches", "launches", most[0], launches, case.launches),
        count_row(f"{case}, forward, messages", "calls", most[1], calls, 0),
    ]


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - bench.rows calls it so
    report, rounds = Results(), QUICK_ROUNDS if quick else ROUNDS
    task = progress.add_task("starting", total=len(CASES) + len(FAMILIES) + 2)
    ring = 32 if quick else 128
    with TreeWorker(ROOT) as here, base_worker() as there:
        for case in CASES:
            progress.update(task, description=str(case))
            report.rows.extend(forward_rows(case, here, there, rounds))
            progress.advance(task)
        progress.update(task, description="weft.attention")
        timed = alternate(here, there, rounds, "attention_seconds")
        report.rows.append(time_row("weft.attention, 16 tokens, one process", timed, NO_SLOWER, "µs"))
        progress.update(task, advance=1, description=f"simulating {8 * ring:,} ranks")
        timed = alternate(here, there, SIMULATIONS, "simulate_seconds", ring)
        report.rows.append(time_row(f"simulate usp:8x{ring}, CPU time", timed, NO_SLOWER, "s"))
        progress.advance(task)
    for family in FAMILIES:
        progress.update(task, description=f"lowering {family}")
        for direction, points in lowering(family, quick=quick).items():
            rows, line = growth_rows(family, direction, points)
            report.rows.extend(rows)
            report.lines.append(line)
        progress.advance(task)
    return report


if __name__ == "__main__":
    main(measure, __doc__ or "")
