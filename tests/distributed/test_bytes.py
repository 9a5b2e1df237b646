"""Bytes that the transport was given, against limits.md and against what the schedule says of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import weft
from tests.cases import kinds, names, random_case, token_mask
from tests.distributed import limits
from tests.distributed.jobs import Worlds, problem
from tests.run.dense import Truth
from tests.threads import ThreadComm, run_threads
from tests.worlds import SIZES
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.plan.choose import build, usp_names
from weft.run.comm import Comm
from weft.run.execute import Executor
from weft.run.kernels import choose
from weft.run.world import world_of
from weft.schedule.measure import measure
from weft.schedule.reverse import reverse

Sent = tuple[int, int]
"""Bytes of one rank, forward and backward."""
THREADS = (2, 3, 4, 6, 8)
PLANS = [
    pytest.param(ranks, name, marks=[pytest.mark.soak] if ranks > 4 else [])
    for ranks in THREADS
    for name in kinds(ranks)[1:]
]


def counted(comm: Comm, *steps: Callable[[], Any]) -> list[int]:
    found = []
    for step in steps:
        before = comm.bytes_sent
        step()
        found.append(comm.bytes_sent - before)
    return found


def by_gloo(truth: Truth, options: dict[str, Any]) -> Sent:
    inputs = [x.requires_grad_() for x in truth.inputs(dist.get_rank())]
    outs = []
    forward, backward = counted(
        world_of(None, 60.0).comm,
        lambda: outs.append(weft.attention(*inputs, scale=truth.scale, **options)),
        lambda: outs[0].backward(truth.slope(dist.get_rank())),
    )
    return forward, backward


def by_threads(truth: Truth, schedule: Schedule, keep: str = "auto") -> list[Sent]:
    def job(comm: ThreadComm) -> list[int]:
        executor, inputs = Executor(schedule, comm, choose("auto"), keep=keep), truth.inputs(comm.rank)
        saved = []
        return counted(
            comm,
            lambda: saved.extend(executor.forward(*inputs, truth.scale, keep=True)),
            lambda: executor.backward(truth.slope(comm.rank), inputs, *saved, truth.scale),
        )

    return [(forward, backward) for forward, backward in run_threads(truth.problem.ranks, job)]


def told(schedule: Schedule, keep: str = "auto") -> list[Sent]:
    """What the schedule says it will send."""
    ahead, back = measure(schedule), measure(reverse(schedule, keep=keep))
    return [(ahead.sent(rank), back.sent(rank)) for rank in range(schedule.problem.ranks)]


def divisible(ranks: int, *, share: int = 2, **sizes: Any) -> Problem:
    return problem(ranks, 3 * ranks, heads=share * ranks, kv_heads=ranks, **sizes)


def formula(name: str, case: Problem) -> int:
    """Bytes that every rank sends forward."""
    if name.startswith("usp"):
        u, r = map(int, name.removeprefix("usp:").split("x"))
        return limits.usp(case, u, r) * case.item_bytes
    return {"ulysses": limits.ulysses, "ring": limits.ring, "gather": limits.ring}[name](
        case
    ) * case.item_bytes


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("ranks", THREADS)
def test_every_rank_sends_what_the_formula_says(ranks: int, dtype: str) -> None:
    case = divisible(ranks, dtype=dtype)
    truth = Truth.of(case)
    for name in ("ulysses", "ring", "gather", *usp_names(ranks)):
        sent = by_threads(truth, build(name, case, truth.mask))
        assert {forward for forward, _ in sent} == {formula(name, case)}, name


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("size", SIZES)
def test_every_process_sends_what_the_formula_says(worlds: Worlds, size: int, share: int) -> None:
    case = divisible(size, share=share)
    for name in ("ulysses", "ring", "gather", *usp_names(size)):
        sent = worlds(size).run(by_gloo, Truth.of(case), {"plan": name})
        assert {forward for forward, _ in sent} == {formula(name, case)}, name


@pytest.mark.parametrize("size", SIZES)
def test_gather_fetches_the_keys_that_are_needed_and_not_owned(worlds: Worlds, size: int) -> None:
    tiles = np.random.default_rng(size).random((3, 2 * size, 2 * size)) < 0.3
    mask = BlockMask.from_tiles(tiles, q_len=10 * size, kv_len=10 * size, block_q=5)
    case = problem(size, 10 * size)
    wanted = 0
    for rank in range(size):
        held = case.q.held(rank).array
        needed = token_mask(mask)[:, held].any(axis=1)
        needed[:, held] = False
        wanted += 2 * int(needed.sum()) * case.head_dim * case.item_bytes
    sent = worlds(size).run(by_gloo, Truth.of(case, mask), {"plan": "gather", "mask": mask})
    assert sum(forward for forward, _ in sent) == wanted


@pytest.mark.parametrize(
    "keep", ["auto", *(pytest.param(how, marks=pytest.mark.soak) for how in ("all", "none"))]
)
@pytest.mark.parametrize(("ranks", "name"), PLANS)
def test_threads_send_what_the_schedule_says_both_ways(ranks: int, name: str, keep: str) -> None:
    truth = Truth.of(problem(ranks, 31, heads=6, kv_heads=2, dtype="bfloat16", batch=2))
    schedule = build(name, truth.problem, truth.mask)
    assert by_threads(truth, schedule, keep) == told(schedule, keep)


@pytest.mark.parametrize("size", SIZES)
def test_processes_send_what_the_schedule_says_both_ways(worlds: Worlds, size: int) -> None:
    truth = Truth.of(problem(size, 31, heads=6, kv_heads=2, dtype="bfloat16", batch=2))
    for name in names(size):
        schedule = build(name, truth.problem, truth.mask)
        assert worlds(size).run(by_gloo, truth, {"plan": name}) == told(schedule), name


@pytest.mark.parametrize("seed", range(20))
def test_any_case_sends_what_the_schedule_says_both_ways(seed: int) -> None:
    case = random_case(np.random.default_rng(seed), 97)
    assert by_threads(Truth.of(case.problem, case.mask), case.schedule) == told(case.schedule)


def test_gradients_of_16_bit_inputs_are_summed_in_32_bits_and_nothing_else_grows(worlds: Worlds) -> None:
    case = divisible(2, dtype="bfloat16")
    for _, backward in worlds(2).run(by_gloo, Truth.of(case), {"plan": "ulysses"}):
        # dO goes as O came, in 16 bits; dQ, dK, dV go home in 32; K and V were kept.
        queries = case.batch * case.head_dim * case.heads * case.q.size // 4
        assert backward == queries * (2 + 4) + queries * 4


def test_one_rank_sends_nothing() -> None:
    x = torch.randn(1, 2, 5, 3, requires_grad=True)
    assert counted(world_of(None, 60.0).comm, lambda: weft.attention(x, x, x).sum().backward()) == [0]
