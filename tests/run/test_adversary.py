"""The executor over a transport that is as bad as NCCL may be, against attention written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.adversary import AdversaryComm, run_adversary
from tests.cases import Case, cases
from tests.run.dense import Truth
from weft.core.errors import CommError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.plan.choose import build
from weft.run.arena import Arena
from weft.run.execute import Executor
from weft.run.kernels import choose

KEEPS = st.sampled_from(("all", "none", "auto"))
Layer = tuple[Tensor, tuple[Tensor, ...]]
"""An output and its gradients."""


def train(comm: AdversaryComm, layers: list[tuple[Schedule, Truth]], keep: str) -> list[Layer]:
    """Forwards of all layers in one arena, an inference in between, then all backwards."""
    arena = Arena()
    executors = [Executor(schedule, comm, choose("exact"), keep=keep, arena=arena) for schedule, _ in layers]
    saved: list[tuple[Tensor, list[Tensor]]] = []
    for executor, (_, truth) in zip(executors, layers, strict=True):
        saved.append(executor.forward(*truth.inputs(comm.rank), truth.scale, keep=True))
        executor.forward(*truth.inputs(comm.rank), truth.scale, keep=False)
    grads: list[tuple[Tensor, ...]] = []
    for executor, (_, truth), (out, kept) in reversed(list(zip(executors, layers, saved, strict=True))):
        inputs = truth.inputs(comm.rank)
        grads.insert(0, executor.backward(truth.slope(comm.rank), inputs, out, kept, truth.scale))
    return [(out, grad) for (out, _), grad in zip(saved, grads, strict=True)]


def check(case: Case, keep: str, *, collective: bool, tolerance: float = 1e-10) -> None:
    """Two layers: one with the case's own plan, another with a ring."""
    lower, upper = (Truth.of(case.problem, case.mask, seed=seed) for seed in (1, 2))
    layers = [(case.schedule, lower), (build("ring", case.problem, case.mask), upper)]
    results = run_adversary(case.problem.ranks, lambda comm: train(comm, layers, keep), collective=collective)
    for at, (_, truth) in enumerate(layers):
        assert truth.output_error([layer[at][0] for layer in results]) < tolerance
        assert truth.gradient_error([layer[at][1] for layer in results]) < tolerance * truth.size


@settings(max_examples=60)
@given(case=st.one_of(cases(47), cases(200)), keep=KEEPS, collective=st.booleans())
def test_any_schedule_equals_dense_attention_over_the_adversary(
    case: Case, keep: str, collective: bool
) -> None:
    check(case, keep, collective=collective)


@settings(max_examples=15)
@given(case=cases(61, dtype="float32"), keep=KEEPS, collective=st.booleans())
def test_any_schedule_in_float32_equals_dense_attention_over_the_adversary(
    case: Case, keep: str, collective: bool
) -> None:
    check(case, keep, collective=collective, tolerance=1e-4)


@pytest.mark.soak
@settings(max_examples=1000)
@given(case=cases(), keep=KEEPS, collective=st.booleans())
def test_many_schedules_equal_dense_attention_over_the_adversary(
    case: Case, keep: str, collective: bool
) -> None:
    check(case, keep, collective=collective)


@pytest.mark.parametrize("warm_up", [True, False])
def test_a_first_exchange_without_all_ranks_needs_a_warm_up(warm_up: bool) -> None:
    tokens = Layout.even(5, 8)
    problem = Problem(batch=1, heads=2, kv_heads=2, head_dim=4, q=tokens, kv=tokens, dtype="float64")
    truth = Truth.of(problem)
    layers = [(build("ring", problem, BlockMask.dense(2, 5)), truth)]

    def run() -> list[Any]:
        return run_adversary(8, lambda comm: train(comm, layers, "auto"), warm_up=warm_up)

    if warm_up:
        assert truth.output_error([layers[0][0] for layers in run()]) < 1e-10
        return
    with pytest.raises(
        CommError, match=r"is the first exchange of the group, and ranks \[[\d, ]+\] take no part"
    ):
        run()


# The adversary itself: each of its rules can make a careless program fail.


def swapped(job: Callable[[AdversaryComm, Tensor, Tensor], object], ranks: int = 2) -> list[Any]:
    """Let each rank run a job with a buffer that holds its number plus 1, and one to receive into."""

    def run(comm: AdversaryComm) -> object:
        return job(
            comm, torch.full((4,), comm.rank + 1, dtype=torch.uint8), torch.zeros(4, dtype=torch.uint8)
        )

    return run_adversary(ranks, run)


def test_messages_arrive() -> None:
    def job(comm: AdversaryComm, going: Tensor, coming: Tensor) -> list[int]:
        peer = 1 - comm.rank
        transit = comm.post([(peer, going)], [(peer, coming)], "swap", 0)
        transit.wait_for(peer)
        transit.wait_sent(peer)
        return coming.tolist()

    assert swapped(job) == [[2] * 4, [1] * 4]


def test_a_buffer_is_poisoned_until_it_is_waited_for() -> None:
    def job(comm: AdversaryComm, going: Tensor, coming: Tensor) -> list[int]:
        peer = 1 - comm.rank
        transit = comm.post([(peer, going)], [(peer, coming)], "swap", 0)
        early = coming.tolist()
        comm.all_gather_ints([0])
        transit.finish()
        return early

    assert swapped(job) == [[0xFF] * 4] * 2


def test_a_buffer_that_is_written_before_its_wait_is_sent_so() -> None:
    def job(comm: AdversaryComm, going: Tensor, coming: Tensor) -> list[int]:
        peer = 1 - comm.rank
        transit = comm.post([(peer, going)], [(peer, coming)], "swap", 0)
        going.fill_(9)
        comm.all_gather_ints([0])
        transit.wait_for(peer)
        return coming.tolist()

    assert swapped(job) == [[9] * 4] * 2


def test_waiting_for_one_message_moves_all_of_its_post_and_of_those_before() -> None:
    def job(comm: AdversaryComm, going: Tensor, coming: Tensor) -> list[list[int]]:
        peers = [peer for peer in range(3) if peer != comm.rank]
        buffers = [[coming.clone() for _ in peers] for _ in range(2)]
        transits = [
            comm.post([(peer, going) for peer in peers], list(zip(peers, into, strict=True)), f"op {op}", op)
            for op, into in enumerate(buffers)
        ]
        transits[1].wait_for(peers[0])
        return [buffer.tolist() for into in buffers for buffer in into]

    expected = [[[peer + 1] * 4 for peer in range(3) if peer != rank] * 2 for rank in range(3)]
    assert swapped(job, ranks=3) == expected


def test_messages_meet_in_the_order_of_posts_whatever_their_tags() -> None:
    def job(comm: AdversaryComm, going: Tensor, coming: Tensor) -> None:
        peer = 1 - comm.rank
        sizes = (4, 2) if comm.rank else (2, 4)
        for size in sizes:
            comm.post([(peer, going[:size])], [(peer, coming[:size])], "swap", tag=size).finish()

    with pytest.raises(CommError, match="expects . bytes and meets swap of rank . with"):
        swapped(job)


def test_works_that_wait_for_each_other_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sends to the next one first and receives later, in a work of its own."""
    monkeypatch.setattr("tests.adversary.TIMEOUT", 0.2)

    def job(comm: AdversaryComm, going: Tensor, coming: Tensor) -> None:
        after, before = (comm.rank + 1) % 3, (comm.rank - 1) % 3
        comm.post([(after, going)], [], "send", 0)
        comm.post([], [(before, coming)], "receive", 0).finish()

    with pytest.raises(CommError, match="Waited in vain for receive on rank"):
        swapped(job, ranks=3)


def test_a_collective_lies_side_by_side() -> None:
    def job(comm: AdversaryComm, going: Tensor, coming: Tensor) -> list[int]:
        sends, receives = ([(at, x[2 * at : 2 * at + 2]) for at in range(2)] for x in (going, coming))
        comm.all_to_all(sends, receives, "all").finish()
        early = coming.tolist()
        with pytest.raises(CommError, match="not side by side"):
            comm.all_to_all(sends[::-1], receives, "all")
        return early

    assert swapped(job) == [[1, 1, 2, 2]] * 2
