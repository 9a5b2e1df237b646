"""The simulator against the clock: strategies, sizes, dense and sparse, transports, on two and four ranks.

    python -m bench.simulator [--quick] [--json FILE]

Links, copies and kernel are calibrated once for each transport; then every case runs for real and in
the simulator. Ranks are processes that share this machine's cores, and the simulator knows it; nothing
is fitted to a case. Two more rows ask how long simulating takes: 8 ranks, and 1024 in one ring.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median, quantiles

import torch
import torch.distributed as dist
from rich.progress import Progress

from bench.pace import paced, seconds_of
from bench.rows import Line, Results, Row, interleave, main, undisturbed
from bench.stage import STAGE, play
from bench.strategies import kendall
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.masks.random import random_mask
from weft.plan.choose import build
from weft.run.attention import attention
from weft.run.measure.calibrate import calibrate
from weft.run.spawn.pool import Pool
from weft.schedule.measure import attend_works
from weft.simulate.clusters import cluster
from weft.simulate.events import simulate

HEADS, DIM, BLOCK, DENSITY = 8, 64, 64, 0.25
PLANS = {2: ("ulysses", "ring", "gather"), 4: ("ulysses", "ring", "usp:2x2", "gather")}
SIZES = {"dense": (1024, 2048), "sparse": (3072, 6144)}
WORLDS = (("shm", 4), ("shm", 2), ("group", 4), ("group", 2))
QUICK = (("shm", 4), ("group", 2))
MEDIAN, TAIL, TAU = 0.12, 0.25, 0.85
SMALL_SECONDS, LARGE_SECONDS, LARGE_BYTES = 5e-3, 10.0, 2e9


@dataclass(frozen=True)
class SimulatorCase:
    ranks: int
    kind: str
    tokens: int
    plan: str

    def __str__(self) -> str:
        return f"{self.plan}, {self.tokens} {self.kind}"

    def schedule(self) -> Schedule:
        shape = (HEADS, self.tokens, self.tokens)
        sparse = self.kind == "sparse"
        mask = (
            random_mask(*shape, block=BLOCK, density=DENSITY, seed=1) if sparse else BlockMask.dense(*shape)
        )
        layout = Layout.even(self.tokens, self.ranks)
        problem = Problem(batch=1, heads=HEADS, kv_heads=HEADS, head_dim=DIM, q=layout, kv=layout)
        return build(self.plan, problem, mask)


def cases(ranks: int) -> list[SimulatorCase]:
    sizes = [(kind, size) for kind, sizes in SIZES.items() for size in sizes]
    return [SimulatorCase(ranks, kind, size, plan) for kind, size in sizes for plan in PLANS[ranks]]


# On a rank.


def prepare(wanted: Sequence[SimulatorCase]) -> None:
    torch.manual_seed(0)
    contenders: dict[str, Callable[[], object]] = {}
    for case in wanted:
        schedule = case.schedule()
        rows = schedule.problem.home("q").rows(dist.get_rank())
        q, k, v = (torch.randn(1, HEADS, rows, DIM) for _ in range(3))
        contenders[str(case)] = partial(attention, q, k, v, plan=schedule)
        contenders[str(case)]()
    STAGE.clear()
    STAGE.update(paced(contenders))


# In the parent.


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - bench.rows calls it so
    report = Results()
    worlds = QUICK if quick else WORLDS
    task = progress.add_task("calibrating", total=len(worlds) + 1)
    topologies: dict[str, Topology] = {}
    points: list[tuple[float, float]] = []
    for transport, ranks in worlds:
        progress.update(task, description=f"{transport}, {ranks} ranks")
        with Pool(ranks, threads=1, timeout=120.0, transport=transport) as pool:
            if transport not in topologies:
                topology = topologies[transport] = pool.run(partial(calibrate, head_dim=DIM))[0]
                report.lines.append(Line(case="calibrated", name=transport, note=_told(topology)))
            here = replace(topologies[transport], devices=ranks)
            points += _compare(
                pool, f"{transport}, {ranks} ranks", cases(ranks), here, 11 if quick else 40, report
            )
        progress.advance(task)
    report.rows.extend(_agreement(points))
    progress.update(task, description="simulating many ranks")
    report.rows.extend([_few_ranks(), _many_ranks(quick=quick)])
    return report


def _compare(  # noqa: PLR0913 - what ran where
    pool: Pool, world: str, wanted: list[SimulatorCase], topology: Topology, seconds: float, report: Results
) -> list[tuple[float, float]]:
    """Time some cases; returns (predicted, measured) of each."""
    pool.run(prepare, wanted)
    rounds = undisturbed(list(interleave(partial(pool.run, play), seconds, least=6)))
    pairs: list[tuple[float, float]] = []
    for case in wanted:
        measured = seconds_of(str(case), rounds, topology)
        predicted = simulate(case.schedule(), topology).seconds
        pairs.append((predicted, measured))
        note = f"predicted {predicted * 1e3:.1f} ms, {predicted / measured - 1:+.0%}"
        report.lines.append(Line(case=world, name=str(case), measured=measured * 1e3, note=note))
    return pairs


def _agreement(points: list[tuple[float, float]]) -> list[Row]:
    errors = [abs(predicted / measured - 1) for predicted, measured in points]
    middle, tail, tau = median(errors), quantiles(errors, n=10)[-1], kendall(points)
    return [
        _row(f"error of {len(points)} cases, median", middle * 100, "%", MEDIAN * 100, below=True),
        _row(f"error of {len(points)} cases, 90th percentile", tail * 100, "%", TAIL * 100, below=True),
        _row(f"order of {len(points)} cases", tau, "Kendall's tau", TAU, below=False),
    ]


def _few_ranks() -> Row:
    schedule, topology = _model("usp:4x2", 8, tokens=32768), cluster("8xh100")
    works = attend_works(schedule)
    taken = [_seconds(lambda: simulate(schedule, topology, works)) for _ in range(25)]
    return _row("simulate usp:4x2, 40 heads", median(taken) * 1e3, "ms", SMALL_SECONDS * 1e3, below=True)


def _many_ranks(*, quick: bool) -> Row:
    ring = 32 if quick else 128
    schedule, topology = _model(f"usp:8x{ring}", 8 * ring, tokens=256 * 8 * ring), cluster(f"{ring}x8xh100")
    works = attend_works(schedule)
    taken = _seconds(lambda: simulate(schedule, topology, works))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    name = f"simulate {8 * ring} ranks, {len(schedule.ops)} operations ({peak / 1e9:.1f} GB)"
    row = _row(name, taken, "s", LARGE_SECONDS, below=True)
    return replace(
        row, bar=f"{row.bar}, ≤ {LARGE_BYTES / 1e9:.0f} GB", holds=row.holds and peak <= LARGE_BYTES
    )


def _model(name: str, ranks: int, *, tokens: int) -> Schedule:
    layout = Layout.even(tokens, ranks)
    problem = Problem(batch=1, heads=40, kv_heads=40, head_dim=128, q=layout, kv=layout, dtype="bfloat16")
    return build(name, problem, random_mask(40, tokens, tokens, block=128, density=DENSITY))


def _seconds(what: Callable[[], object]) -> float:
    began = time.process_time()  # one process that waits for nothing: what others do is not the question
    what()
    return time.process_time() - began


def _row(case: str, measured: float, unit: str, bar: float, *, below: bool) -> Row:
    holds = measured <= bar if below else measured >= bar
    return Row(case=case, measured=measured, unit=unit, bar=f"{'≤' if below else '≥'} {bar:g}", holds=holds)


def _told(topology: Topology) -> str:
    return (
        f"{topology.intra.bandwidth / 1e9:.2f} GB/s, {topology.intra.latency * 1e6:.0f} µs, "
        f"{topology.post_seconds * 1e6:.0f} µs a post; {topology.flops / 1e9:.0f} GFLOP/s, "
        f"{topology.call_seconds * 1e6:.0f} µs a call, {topology.row_seconds * 1e6:.1f} µs a row, "
        f"{topology.tile_seconds * 1e9:.0f} ns a tile; "
        f"memory {topology.memory_bandwidth / 1e9:.1f} GB/s; {topology.cores} cores"
    )


if __name__ == "__main__":
    main(measure, __doc__ or "")
