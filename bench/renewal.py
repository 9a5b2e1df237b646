"""Masks that change: the CPU time of a renewed mask on one rank, of a new plan beside it, and of the change.

    python -m bench.renewal [--quick] [--json FILE]

Wan2.1-14B at 75,600 tokens, 40 heads of different density, the k best tiles of each row. In each step 5 % of
the scores are drawn anew, and densities move by lognormal noise of sigma 0.05. A renewal is what lies between
boolean tiles in host memory and the lists of blocks that the kernels of a bound program read: the mask, the
digest that ranks compare, and the lists. One thread; nothing is sent and no kernel runs. Rows are the medians
over steps of the worst of some ranks. Times of commit 45b0107 stand beside: its range over 8 and 32 ranks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from rich.progress import Progress

from bench.dry import DIM, HEADS, SCALE, DryRun
from bench.heads import planner_of
from bench.rows import Line, Results, Row, main
from weft.core.layout import Layout
from weft.core.mask import BlockMask, BoolArray
from weft.core.problem import Problem
from weft.core.schedule import Attend, Schedule
from weft.plan.place import AttentionId, Planned
from weft.program.steps import Attention
from weft.run.bind import RunFrame
from weft.run.execute import FORWARD, Executor
from weft.run.planner import Planner
from weft.simulate.clusters import cluster

TOKENS = 75_600
DENSITY, SPREAD, DRIFT = 0.2, 0.5, 0.05
HOST = torch.device("cpu")
UNIT = "ms CPU"
MASK_MS = {64: 30.0, 128: 12.0}
BEFORE_MS = {64: (540.0, 820.0), 128: (130.0, 210.0)}
"""At commit 45b0107, where every mask was planned, lowered and listed anew."""
PLAN_MS = 50.0
WAYS = {8: ("ulysses+balanced", "8xh100"), 32: ("usp:8x4+balanced", "4x8xh100")}
T = TypeVar("T")


class Renewal(NamedTuple):
    """Milliseconds of one renewed mask on one rank."""

    mask: float
    digest: float
    lists: float


def drifting(block: int, steps: int, tokens: int = TOKENS, heads: int = HEADS) -> list[BoolArray]:
    """Return the tiles [heads, q blocks, kv blocks] of each step."""
    blocks = -(-tokens // block)
    masks = [np.empty((heads, blocks, blocks), dtype=np.bool_) for _ in range(steps)]
    for head in range(heads):
        random = np.random.default_rng(head)
        scores = random.random((blocks, blocks), dtype=np.float32)
        density = DENSITY * random.lognormal(-(SPREAD**2) / 2, SPREAD)
        for step in range(steps):
            if step:
                anew = np.flatnonzero(random.random(scores.size, dtype=np.float32) < DRIFT)
                scores.reshape(-1)[anew] = random.random(anew.size, dtype=np.float32)
                density *= random.lognormal(0, DRIFT)
            last = min(blocks, max(1, round(density * blocks))) - 1
            masks[step][head] = scores <= np.partition(scores, last, axis=1)[:, last, None]
    return masks


def mask_of(tiles: BoolArray, block: int, tokens: int = TOKENS) -> BlockMask:
    return BlockMask.from_tiles(tiles, q_len=tokens, kv_len=tokens, block_q=block)


def took(call: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    result = call()
    return result, 1e3 * (time.process_time() - began)


def attends(executor: Executor) -> list[Attend]:
    """Return the partial attentions of a rank's forward, in the order of its program."""
    program = executor.program(FORWARD, collective=True)
    ops = [executor.schedule.ops[step.op] for step in program.steps if isinstance(step, Attention)]
    return [op for op in ops if isinstance(op, Attend)]


def renewed(
    executor: Executor, tiles: BoolArray, block: int, tokens: int = TOKENS
) -> tuple[Renewal, Executor]:
    """Renew the mask of an executor that serves any: what it costs, and the executor for it."""
    ops = attends(executor)
    mask, making = took(lambda: mask_of(tiles, block, tokens))
    _, digest = took(lambda: mask.digest)
    other, listing = took(lambda: _listed(executor, mask, ops))
    return Renewal(making, digest, listing), other


def _listed(executor: Executor, mask: BlockMask, ops: list[Attend]) -> Executor:
    other = executor.for_mask(mask)
    for op in ops:
        for _, _, tiles in other.tiles.of(op).by_heads:  # as kernels ask for them
            if tiles.sparse:
                tiles.lists(HOST)
    return other


def inverted(executor: Executor) -> float:
    """Make the lists of a backward, by keys, of what a forward has listed: its milliseconds."""

    def invert() -> None:
        for op in attends(executor):
            for _, _, tiles in executor.tiles.of(op).by_heads:
                if tiles.sparse:
                    _ = tiles.lists(HOST).inverted

    return took(invert)[1]


class PlanChange(NamedTuple):
    """Milliseconds of a change to a new plan, besides planning."""

    prepared: float
    """Lowering on the planner's thread, and all of binding that needs no memory."""
    on_path: float
    """What the first call by the plan takes more than the next."""


def switched(old: Schedule, new: Schedule, rank: int) -> PlanChange:
    """Change from a plan that has run, as `World.prepare` and `World.change` do."""
    run = DryRun(old, rank)
    inputs: Any = {"home q": (run.q,), "home kv": (run.k, run.v)}

    def begin(executor: Executor) -> None:
        frame = RunFrame(executor.comm, executor.kernel, SCALE, run.q.device, executor.tiles)
        executor.begin(FORWARD, frame, inputs)

    begin(run.executor)
    executor, prepared = took(lambda: run.executor.renewed(new))
    first, again = (took(lambda: begin(executor))[1] for _ in range(2))
    return PlanChange(prepared, first - again)


class Changes(NamedTuple):
    """Milliseconds of a mask's turn in the planner: on the thread of the model, and beside it."""

    on_path: float
    beside: float
    plan: Planned


def planned(planner: Planner, problem: Problem, masks: list[BlockMask], ranks: int) -> Iterator[Changes]:
    way, machine = WAYS[ranks]
    place = AttentionId("wan", 0, 0, "topk")
    for step, mask in enumerate(masks):
        _ = mask.digest  # of the renewal
        began, own = time.process_time(), time.thread_time()
        plan = planner.plan(place, problem, mask, step=step, topology=lambda: cluster(machine), strategy=way)
        on_path = time.thread_time() - own
        planner.finish()
        yield Changes(1e3 * on_path, 1e3 * (time.process_time() - began - on_path), plan)


def problem_of(ranks: int, tokens: int = TOKENS, heads: int = HEADS) -> Problem:
    layout = Layout.even(tokens, ranks)
    return Problem(batch=1, heads=heads, kv_heads=heads, head_dim=DIM, q=layout, kv=layout, dtype="bfloat16")


def case(block: int, ranks: int, tiles: list[BoolArray], some: int) -> Results:
    """Measure the steps of one block size on one number of ranks."""
    name, problem = f"block {block}, {ranks} ranks {WAYS[ranks][0]}", problem_of(ranks)
    masks = [mask_of(each, block) for each in tiles]
    with TemporaryDirectory() as folder:
        planner = planner_of(ranks, folder)
        changes = list(planned(planner, problem, masks, ranks))
        planner.close()
    plan = changes[0].plan
    by_rank: list[list[Renewal]] = []
    last: Any = None
    backward: list[float] = []
    for rank in np.linspace(0, ranks - 1, some).round().astype(int).tolist():
        executor = DryRun(plan.schedule, rank).executor
        steps: list[Renewal] = []
        for each in tiles:  # the last but one mask is freed: its memory is there for the next
            spent, last = renewed(executor, each, block)
            steps.append(spent)
        by_rank.append(steps[1:])
        backward.append(inverted(last))
    return _report(name, block, by_rank, backward, changes[1:])


def _report(
    name: str, block: int, by_rank: list[list[Renewal]], backward: list[float], changes: list[Changes]
) -> Results:
    sums = [median(sum(each) for each in steps) for steps in by_rank]
    parts = [median(values) for values in zip(*by_rank[int(np.argmax(sums))], strict=True)]
    plans = [(old.plan, new.plan) for old, new in zip(changes, changes[1:], strict=False)]
    anew = [switched(old.schedule, new.schedule, 0) for old, new in plans if new is not old]
    prepared, change = (median(each) for each in zip(*anew, strict=True)) if anew else (0.0, 0.0)
    beside = median(each.beside for each in changes) + prepared
    on_path = median(each.on_path for each in changes)
    low, high = BEFORE_MS[block]
    report = Results()
    report.rows.append(
        Row(
            case=f"{name}: renewed mask",
            measured=max(sums),
            unit=UNIT,
            peer=low,
            peer_name=f"45b0107 ({low:.0f} to {high:.0f})",
            bar=f"≤ {MASK_MS[block]:.0f} ms (mean of the ranks {fmean(sums):.1f})",
            holds=max(sums) <= MASK_MS[block],
        )
    )
    report.rows.append(
        Row(
            case=f"{name}: new plan, beside the run",
            measured=beside,
            unit=UNIT,
            bar=f"≤ {PLAN_MS:.0f} ms; {len(anew)} of {len(changes) - 1} steps changed it",
            holds=beside <= PLAN_MS,
        )
    )
    for what, value in zip(("mask of tiles", "digest", "forward lists"), parts, strict=True):
        report.lines.append(Line(case=name, name=what, measured=value, unit=UNIT))
    first = "views of memory for the first call by it"
    report.lines.append(
        Line(case=name, name="backward lists", measured=max(backward), note="when first needed")
    )
    report.lines.append(
        Line(case=name, name="planner, on the model's thread", measured=on_path, note="a new mask")
    )
    report.lines.append(Line(case=name, name="changing to a new plan", measured=change, note=first))
    return report


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - bench.rows calls it so
    torch.set_num_threads(1)
    report = Results()
    task = progress.add_task("masks", total=2 * len(WAYS))
    for block in MASK_MS:
        tiles = drifting(block, 4 if quick else 8)
        for ranks in WAYS:
            progress.update(task, description=f"block {block}, {ranks} ranks")
            times = case(block, ranks, tiles, 2 if quick else 4)
            report.rows.extend(times.rows)
            report.lines.extend(times.lines)
            progress.advance(task)
    return report


if __name__ == "__main__":
    main(measure, __doc__ or "")
