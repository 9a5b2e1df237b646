"""Wan2.1-14B with SpargeAttn on H100, simulated: one static strategy for all layers against weft's planner.

    python -m bench.sparge [--quick] [--json FILE]

Heads have the densities of a real run (see bench.heads), by step and layer; which tiles they keep is made up,
by scores that drift as a video's (see `masks.evolving`). Static is what db-SP compares itself with: one U × R
for all layers and steps, heads and blocks in their order; the fastest one, known only afterwards, is taken
too. weft's planner chooses strategies by layer, and who computes what by the steps before; only the first
step is planned from its own mask. Around attention it is a step of `simulate.whole`, as in bench.papers.

db-SP reports 1.25 × end to end, the mean over models, sparsities and machines; of Wan with SpargeAttn on 8
H800, its own figure says 1.12 ×. A row says what there is to gain, and holds if weft gains as much as is
reported, or most of what masks of the same density with nothing to balance would give: attention is not all
of a step, the most uneven strategy is not the fastest, and messages between machines take their time.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cache
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress

from bench import published as paper
from bench.heads import KV_BLOCKS, Q_BLOCKS, TRACE, planner_of
from bench.papers import LINEAR, machine, peak, problem_of
from bench.rows import Line, Results, Row, main
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid, nearest
from weft.masks.random import random_mask
from weft.masks.synthetic import synthetic_scores
from weft.plan.balance import ratio
from weft.plan.balanced import Balancer
from weft.plan.choose import build, usp_names
from weft.plan.place import AttentionId
from weft.plan.strategies import parse
from weft.simulate.events import simulate
from weft.simulate.model_step import step as step_of
from weft.simulate.models import model

MACHINES = ("8xh100", "4x8xh100")
SIZE, BLOCK, RHO = model("wan2.1-14b"), 128, 0.97
SPARGE = (paper.WAN, "h800", 8, "sparge")
MEAN = 1.25
CASE = next(min(each.static) / each.dbsp for each in paper.END_TO_END if each[:4] == SPARGE)
"""What db-SP reports: of all its cases, and of this one."""
MOST = 2 / 3
WEFT, EVEN = "weft", "even masks, the best static"


class Steps(NamedTuple):
    """Means over layers and steps: seconds of an attention by strategy, and max / mean of the ranks' work."""

    seconds: dict[str, float]
    imbalance: dict[str, float]
    strategies: str


@cache
def mask_of(layer: int, step: int) -> BlockMask:
    """Return the mask of a layer of the file; its steps belong together."""
    densities = np.load(TRACE)["counts"][step, layer] / (Q_BLOCKS * KV_BLOCKS)
    grid = TokenGrid(*SIZE.grid())
    scores = synthetic_scores(SIZE.heads, grid, grid.centers(BLOCK), seed=layer, step=step, rho=RHO)
    tiles = [nearest(-score, density) for score, density in zip(scores, densities.tolist(), strict=True)]
    return grid.mask(np.stack(tiles), BLOCK)


def even_mask(layer: int, steps: range) -> BlockMask:
    """Return a mask with nothing to balance: in each head as much as the mean of a layer's, anywhere."""
    density = float(np.load(TRACE)["counts"][steps, layer].mean() / (Q_BLOCKS * KV_BLOCKS))
    tokens = int(np.prod(SIZE.grid()))
    return random_mask(SIZE.heads, tokens, tokens, block=BLOCK, density=density)


def simulated(name: str, layers: list[int], steps: range) -> Steps:
    topology = machine(name)
    problem = problem_of(SIZE, int(np.prod(SIZE.grid())), topology.ranks)
    ways = usp_names(topology.ranks)
    seconds: dict[str, list[float]] = defaultdict(list)
    imbalance: dict[str, list[float]] = defaultdict(list)
    chosen: set[str] = set()
    with TemporaryDirectory() as folder:
        planner = planner_of(topology.ranks, folder)
        for layer in layers:
            place = AttentionId(SIZE.name, layer, 0, "sparge")
            for step in steps:
                mask = mask_of(layer, step)
                plan = planner.plan(place, problem, mask, step=step, topology=lambda: topology)
                planner.finish()
                balancer = Balancer(problem, mask, topology)
                plans: dict[str, tuple[Any, Any]] = {way: (parse(way, problem.ranks), None) for way in ways}
                plans[WEFT] = plan.strategy, plan.assignment
                chosen.add(str(plan.strategy))
                for way, (strategy, assignment) in plans.items():
                    schedule = build(str(strategy), problem, mask, topology, assignment=assignment)
                    seconds[way].append(simulate(schedule, topology, memory=False).seconds)
                    cost = balancer.cost_of(strategy, assignment) if assignment else balancer.assign(strategy)
                    imbalance[way].append(ratio(cost.seconds.sum(axis=2)))
        planner.close()
    for mask in (even_mask(layer, steps) for layer in layers):
        schedules = [build(way, problem, mask, topology) for way in ways]
        seconds[EVEN].append(min(simulate(each, topology, memory=False).seconds for each in schedules))
        imbalance[EVEN].append(1.0)
    return Steps(
        {way: fmean(values) for way, values in seconds.items()},
        {way: fmean(values) for way, values in imbalance.items()},
        ", ".join(sorted(chosen)),
    )


def report_of(name: str, steps: Steps) -> Results:
    topology, report = machine(name), Results()
    device = name.rpartition("x")[2]

    def whole(attention: float) -> float:
        return step_of(SIZE, SIZE.grid(), attention, topology, linear_flops=LINEAR * peak(device)).seconds

    static = {way: seconds for way, seconds in steps.seconds.items() if way not in (WEFT, EVEN)}
    best = min(static, key=static.__getitem__)
    ulysses = next(way for way in usp_names(topology.ranks) if way.startswith("usp:8x"))
    ours = whole(steps.seconds[WEFT])
    for way in dict.fromkeys((best, ulysses)):
        taken, busiest = whole(static[way]), steps.imbalance[way]
        attention = SIZE.layers * static[way]
        even, gain = taken / whole(steps.seconds[EVEN]), taken / ours
        kind = "the best static" if way == best else "Ulysses"
        reported = CASE if (name, way) == ("8xh100", "usp:8x1") else MEAN
        report.rows.append(
            Row(
                case=f"Wan 14B, Sparge, {name}: weft over {kind} {way}",
                measured=gain,
                unit="×",
                peer=reported,
                peer_name="db-SP, this case" if reported == CASE else "db-SP, mean of all its cases",
                limit=even,
                bar=f"is {gain:.3f}; attention is {attention / taken:.0%} of a static step, its busiest rank "
                f"has {busiest:.2f} × the mean: even masks would give {even:.3f}",
                holds=gain >= min(reported, 1 + MOST * (even - 1)),
            )
        )
    for way, seconds in steps.seconds.items():
        note = f"attention {1e3 * seconds:.1f} ms, imbalance {steps.imbalance[way]:.3f}"
        if way == WEFT:
            note += f"; {steps.strategies}"
        report.lines.append(
            Line(case=name, name=way, measured=1e3 * whole(seconds), ratio=whole(seconds) / ours, note=note)
        )
    return report


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - bench.rows calls it so
    layers, steps = ([4, 14], range(12, 15)) if quick else ([0, 5, 10, 15], range(30))
    report, task = Results(), progress.add_task("machines", total=len(MACHINES))
    for name in MACHINES:
        progress.update(task, description=name)
        outcome = report_of(name, simulated(name, layers, steps))
        report.rows.extend(outcome.rows)
        report.lines.extend(outcome.lines)
        progress.advance(task)
    return report


if __name__ == "__main__":
    main(measure, __doc__ or "")
