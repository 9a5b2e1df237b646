"""The compiled executor, with threads as ranks, against attention written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cases import Case, cases
from tests.run.dense import Truth
from tests.schedule.partitions import random_schedule
from tests.threads import ThreadComm, run_threads
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition, WorkItem
from weft.core.problem import Problem
from weft.core.schedule import Attend, Piece, Schedule
from weft.plan.choose import build
from weft.run.execute import Executor
from weft.run.kernels import choose
from weft.schedule.gather import gather
from weft.schedule.reverse import reverse
from weft.schedule.verify import verify

KEEPS = st.sampled_from(("all", "none", "auto"))
BACKENDS = st.sampled_from(("exact", "reference"))
Saved = tuple[Tensor, list[Tensor]]


def on_every_rank(schedule: Schedule, job: Callable[[Executor], Any], keep: str, backend: str) -> list[Any]:
    def make_and_run(comm: ThreadComm) -> Any:
        return job(Executor(schedule, comm, choose(backend), keep=keep))

    return run_threads(schedule.problem.ranks, make_and_run)


def forward(executor: Executor, truth: Truth, *, keep: bool = True) -> Saved:
    return executor.forward(*truth.inputs(executor.comm.rank), truth.scale, keep=keep)


def backward(executor: Executor, truth: Truth, saved: Saved) -> tuple[Tensor, ...]:
    rank = executor.comm.rank
    return executor.backward(truth.slope(rank), truth.inputs(rank), *saved, truth.scale)


def both_ways(executor: Executor, truth: Truth) -> tuple[Tensor, tuple[Tensor, ...]]:
    saved = forward(executor, truth)
    return saved[0], backward(executor, truth, saved)


def copies(tensors: tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    return [x.clone() for x in tensors]


def same(some: tuple[Tensor, ...] | list[Tensor], others: tuple[Tensor, ...] | list[Tensor]) -> bool:
    # Bits, because NaN of padding may be in what is kept.
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(some, others, strict=True)
    )


def assert_right(
    truth: Truth, results: list[tuple[Tensor, tuple[Tensor, ...]]], tolerance: float = 1e-10
) -> None:
    assert truth.output_error([out for out, _ in results]) < tolerance
    assert truth.gradient_error([grads for _, grads in results]) < tolerance * truth.size


@settings(max_examples=80)
@given(case=st.one_of(cases(47), cases()), keep=KEEPS, backend=BACKENDS)
def test_any_schedule_compiled_equals_dense_attention(case: Case, keep: str, backend: str) -> None:
    truth = Truth.of(case.problem, case.mask)
    results = on_every_rank(case.schedule, lambda executor: both_ways(executor, truth), keep, backend)
    assert_right(truth, results)


@settings(max_examples=40)
@given(case=cases(97, dtype="float32"), keep=KEEPS)
def test_any_schedule_on_the_compiled_kernel_equals_dense_attention(case: Case, keep: str) -> None:
    truth = Truth.of(case.problem, case.mask)
    results = on_every_rank(case.schedule, lambda executor: both_ways(executor, truth), keep, "cpu")
    assert_right(truth, results, 5e-6)


@settings(max_examples=40)
@given(case=cases(61), keep=KEEPS)
def test_what_is_kept_for_the_backward_does_not_change_the_forward(case: Case, keep: str) -> None:
    truth = Truth.of(case.problem, case.mask)

    def job(executor: Executor) -> bool:
        bare, nothing = forward(executor, truth, keep=False)
        out, _ = forward(executor, truth)
        return nothing == [] and same([bare], [out])

    assert all(on_every_rank(case.schedule, job, keep, "exact"))


@settings(max_examples=15)
@given(case=cases(61), keep=KEEPS, backend=BACKENDS)
def test_a_second_run_is_right_and_leaves_the_first_ones_tensors_alone(
    case: Case, keep: str, backend: str
) -> None:
    first, second = (Truth.of(case.problem, case.mask, seed=seed) for seed in (1, 2))

    def job(executor: Executor) -> tuple[Any, Any, bool]:
        out, saved = forward(executor, first)
        grads = backward(executor, first, (out, saved))
        before = copies([out, *grads])
        bare, _ = forward(executor, first, keep=False)
        again = both_ways(executor, second)
        return (out, grads), again, same([out, *grads], before) and same([bare], [out])

    results = on_every_rank(case.schedule, job, keep, backend)
    assert_right(first, [one for one, _, _ in results])
    assert_right(second, [two for _, two, _ in results])
    assert all(untouched for _, _, untouched in results)


@settings(max_examples=15)
@given(case=cases(61), keep=KEEPS, backend=BACKENDS)
def test_two_layers_may_share_an_executor(case: Case, keep: str, backend: str) -> None:
    lower, upper = (Truth.of(case.problem, case.mask, seed=seed) for seed in (1, 2))

    def job(executor: Executor) -> tuple[Any, Any]:
        first, second = forward(executor, lower), forward(executor, upper)
        later = backward(executor, upper, second)
        return (first[0], backward(executor, lower, first)), (second[0], later)

    results = on_every_rank(case.schedule, job, keep, backend)
    assert_right(lower, [one for one, _ in results])
    assert_right(upper, [two for _, two in results])


@settings(max_examples=40)
@given(case=cases(61), keep=KEEPS)
def test_results_share_no_memory(case: Case, keep: str) -> None:
    truth = Truth.of(case.problem, case.mask)

    def job(executor: Executor) -> bool:
        inputs = truth.inputs(executor.comm.rank)
        out, saved = executor.forward(*inputs, truth.scale, keep=True)
        owners = [x.untyped_storage().data_ptr() for x in (out, *saved, *inputs) if x.numel()]
        contiguous = all(x.is_contiguous() for x in (out, *saved))
        return contiguous and len(set(owners)) == len(owners)

    assert all(on_every_rank(case.schedule, job, keep, "exact"))


@pytest.mark.parametrize("name", ["ulysses", "ring", "zigzag", "gather"])
def test_2047_tokens_on_5_ranks_are_like_any_other(name: str) -> None:
    tokens = Layout.even(2047, 5)
    problem = Problem(batch=1, heads=2, kv_heads=1, head_dim=3, q=tokens, kv=tokens, dtype="float64")
    truth = Truth.of(problem)
    schedule = build(name, problem, truth.mask)
    assert_right(truth, on_every_rank(schedule, lambda e: both_ways(e, truth), "auto", "exact"))


@settings(max_examples=40)
@given(case=cases(97), seed=st.integers(0, 2**16), keep=KEEPS)
def test_any_partition_equals_dense_attention(case: Case, seed: int, keep: str) -> None:
    schedule = random_schedule(np.random.default_rng(seed), case)
    truth = Truth.of(case.problem, case.mask)
    assert_right(truth, on_every_rank(schedule, lambda e: both_ways(e, truth), keep, "exact"))


@pytest.mark.parametrize("keep", ["all", "none"])
def test_two_works_of_one_rank_may_need_overlapping_keys(keep: str) -> None:
    tokens = Layout.even(8, 2)
    problem = Problem(batch=1, heads=1, kv_heads=1, head_dim=3, q=tokens, kv=tokens, dtype="float64")
    tiles = [[[0, 0, 1, 1], [0, 0, 0, 1], [0] * 4, [0] * 4]]
    mask = BlockMask.from_tiles(tiles, q_len=8, kv_len=8, block_q=2)
    work = tuple(WorkItem(Indices.of([0]), Indices.span(at, at + 2)) for at in (0, 2))
    partition = Partition((work, ()), (tokens.held(0), tokens.held(1)))
    schedule = gather(problem, mask, Mesh.of(ring=2), partition)
    truth = Truth.of(problem, mask)
    verify(reverse(schedule, keep=keep))
    assert_right(truth, on_every_rank(schedule, lambda e: both_ways(e, truth), keep, "exact"))


def test_an_attend_may_bring_more_key_heads_than_its_queries_read() -> None:
    tokens, all_tokens = Layout.even(5, 1), Indices.span(0, 5)
    problem = Problem(batch=1, heads=2, kv_heads=2, head_dim=3, q=tokens, kv=tokens, dtype="float64")
    both = Piece("kv", Indices.span(0, 2), all_tokens)
    attends = tuple(Attend(0, Piece("q", Indices.of([head]), all_tokens), both) for head in range(2))
    schedule = Schedule("by hand", problem, BlockMask.dense(2, 5), Mesh.of(ring=1), attends)
    verify(schedule)
    truth = Truth.of(problem)
    assert_right(truth, on_every_rank(schedule, lambda e: both_ways(e, truth), "auto", "exact"))
