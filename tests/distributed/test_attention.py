"""`weft.attention` in worlds of processes, against attention written out."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, cases, kinds, names
from tests.distributed.jobs import Worlds, attend, check, problem, tiles_with_empty_rows
from tests.run.dense import Truth, error
from tests.worlds import SIZES
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.plan.choose import choose

ALL = [(size, plan) for size in SIZES for plan in ("auto", *names(size))]
PLANS = [(size, plan) for size in SIZES for plan in kinds(size)]

TOLERANCES = {"float64": 1e-10, "float32": 5e-6, "bfloat16": 4e-3, "float16": 5e-4}
"""Of outputs, and of gradients in units of the largest; see `check_random` for what rounds more."""

SHAPES: dict[str, dict[str, Any]] = {
    "three heads": {"tokens": 47},
    "grouped heads": {"tokens": 31, "heads": 6, "kv_heads": 2},
    "one key head": {"tokens": 31, "heads": 5, "kv_heads": 1},
    "one head": {"tokens": 23, "heads": 1},
    "batch of three": {"tokens": 17, "batch": 3},
    "head_dim 1": {"tokens": 17, "head_dim": 1},
    "other keys": {"tokens": 29, "kv": 13},
    "one key": {"tokens": 11, "kv": 1},
    "one token": {"tokens": 1},
}


# Each plan with each shape on three ranks, where nothing divides, on two and four with one; all in the soak.
SHAPED = [(3, plan, shape) for plan in kinds(3) for shape in SHAPES]
SHAPED += [(size, plan, shape) for size in (2, 4) for plan, shape in zip(kinds(size), cycle(SHAPES))]
REST = {(size, plan, shape) for size, plan in ALL for shape in SHAPES} - set(SHAPED)
SHAPED += [pytest.param(*case, marks=pytest.mark.soak) for case in sorted(REST)]


@pytest.mark.parametrize(("size", "plan", "shape"), SHAPED)
def test_any_plan_for_any_shape_equals_dense_attention(
    worlds: Worlds, size: int, plan: str, shape: str
) -> None:
    truth = Truth.of(problem(size, **SHAPES[shape]))
    check(truth, worlds(size).run(attend, truth, {"plan": plan}), 5e-6)


@pytest.mark.parametrize(("size", "plan"), PLANS)
@pytest.mark.parametrize("shape", ["grouped heads", "batch of three"])
def test_tensors_with_tokens_before_heads(worlds: Worlds, size: int, plan: str, shape: str) -> None:
    truth = Truth.of(problem(size, **SHAPES[shape]))
    check(truth, worlds(size).run(attend, truth, {"plan": plan, "layout": "bshd"}), 5e-6)


@pytest.mark.parametrize(("size", "plan"), PLANS)
def test_fewer_tokens_than_ranks_leave_some_ranks_without(worlds: Worlds, size: int, plan: str) -> None:
    truth = Truth.of(problem(size, size - 1))
    answers = worlds(size).run(attend, truth, {"plan": plan})
    assert answers[-1][0].shape[2] == 0
    check(truth, answers, 5e-6)


@pytest.mark.parametrize(("size", "plan"), PLANS)
def test_one_rank_more_than_heads_is_no_obstacle(worlds: Worlds, size: int, plan: str) -> None:
    truth = Truth.of(problem(size, 19, heads=size - 1))
    check(truth, worlds(size).run(attend, truth, {"plan": plan}), 5e-6)


@pytest.mark.parametrize(("size", "plan"), ALL)
def test_a_row_that_may_see_nothing_gives_zero_and_gets_zero(worlds: Worlds, size: int, plan: str) -> None:
    mask = tiles_with_empty_rows(3, 53, 53, 8)
    truth = Truth.of(problem(size, 53), mask)
    answers = worlds(size).run(attend, truth, {"plan": plan, "mask": mask})
    check(truth, answers, 5e-6)
    out, (dq, _, _) = answers[0]
    assert not out[:, :, :8].any()
    assert not dq[:, :, :8].any()


@pytest.mark.parametrize(("size", "plan"), PLANS)
def test_an_empty_mask_gives_zeros(worlds: Worlds, size: int, plan: str) -> None:
    mask = BlockMask.from_tiles([[[False] * 3] * 3] * 3, q_len=17, kv_len=17, block_q=7)
    for out, grads in worlds(size).run(
        attend, Truth.of(problem(size, 17), mask), {"plan": plan, "mask": mask}
    ):
        assert not any(x.any() for x in (out, *grads))


@pytest.mark.parametrize(
    ("size", "plan", "ends"),
    [(*plan, ends) for plan, ends in zip(PLANS, cycle([(5, 0), (0, 3), (5, 3), (23, 0)]))],
)
def test_text_on_every_rank_is_attended_once_and_its_gradients_sum_over_ranks(
    worlds: Worlds, size: int, plan: str, ends: tuple[int, int]
) -> None:
    prefix, suffix = ends
    truth = Truth.of(problem(size, 23, q=Layout.even(23, size, prefix=prefix, suffix=suffix)))
    answers = worlds(size).run(attend, truth, {"plan": plan, "prefix": prefix, "suffix": suffix})
    check(truth, answers, 5e-6)


def test_text_may_stand_before_keys_of_another_length_too(worlds: Worlds) -> None:
    q, kv = (Layout.even(tokens, 3, prefix=5) for tokens in (23, 17))
    truth = Truth.of(problem(3, 23, q=q, kv=kv))
    check(truth, worlds(3).run(attend, truth, {"prefix": 5}), 5e-6)


def test_every_rank_has_the_same_output_of_its_text(worlds: Worlds) -> None:
    truth = Truth.of(problem(3, 23, q=Layout.even(23, 3, prefix=5)))
    first, *others = (out[:, :, :5] for out, _ in worlds(3).run(attend, truth, {"prefix": 5}))
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize(
    "layout",
    [
        Layout.zigzag(29, 3),
        Layout.uneven([20, 0, 9]),
        Layout.permuted([[28, 3, 4], [*range(5, 28)], [2, 1, 0]]),
        Layout.even(29, 3).padded(13),
        Layout.even(29, 3, prefix=4).padded([14, 13, 19]),
    ],
    ids=["zigzag", "uneven", "permuted", "padded", "padded text"],
)
@pytest.mark.parametrize("plan", ["auto", *names(3)])
def test_tokens_may_lie_in_any_layout(worlds: Worlds, plan: str, layout: Layout) -> None:
    mask = tiles_with_empty_rows(3, 29, 29, 4)
    truth = Truth.of(problem(3, 29, q=layout), mask)
    check(truth, worlds(3).run(attend, truth, {"plan": plan, "mask": mask, "tokens": layout}), 5e-6)


@pytest.mark.parametrize("plan", names(3))
def test_keys_may_be_replicated(worlds: Worlds, plan: str) -> None:
    truth = Truth.of(problem(3, 19, kv=Layout.replicated(7, 3)))
    options = {"plan": plan, "tokens": 19, "kv_tokens": truth.problem.kv}
    check(truth, worlds(3).run(attend, truth, options), 5e-6)


@pytest.mark.parametrize("how", ["counted", "number", "layout", "mask"])
def test_the_length_may_be_told_in_any_way(worlds: Worlds, how: str) -> None:
    truth = Truth.of(problem(3, 19, kv=11))
    told = {
        "counted": {},
        "number": {"tokens": 19, "kv_tokens": 11},
        "layout": {"tokens": truth.problem.q, "kv_tokens": truth.problem.kv},
        "mask": {"mask": truth.mask},
    }
    check(truth, worlds(3).run(attend, truth, told[how]), 5e-6)


def test_a_plan_or_its_schedule_may_be_given(worlds: Worlds) -> None:
    mask = tiles_with_empty_rows(3, 37, 37, 4)
    truth = Truth.of(problem(3, 37), mask)
    plan = choose(truth.problem, mask)
    for given_plan in (plan, plan.schedule):
        check(truth, worlds(3).run(attend, truth, {"plan": given_plan}), 5e-6)


@pytest.mark.parametrize("backend", ["cpu", "exact", "reference"])
def test_every_kernel_serves(worlds: Worlds, backend: str) -> None:
    truth = Truth.of(problem(2, 23))
    check(truth, worlds(2).run(attend, truth, {"backend": backend}), 5e-6)


RANDOM: dict[str, st.SearchStrategy[Any]] = {
    "case": st.sampled_from(tuple(TOLERANCES)).flatmap(
        lambda dtype: cases(97, min_ranks=2, max_ranks=5, dtype=dtype)
    ),
    "options": st.fixed_dictionaries(
        {"backend": st.sampled_from(("auto", "auto", "exact", "reference")), "auto": st.booleans()}
    ),
    "scale": st.sampled_from((0.37, 0.37, 1.0, 3.0, -0.5, 0.0)),
}


def check_random(worlds: Worlds, case: Case, options: dict[str, Any], scale: float) -> None:
    """Compare with float64, within 4 times what the dtype costs one process with the same formulas."""
    truth = Truth.of(case.problem, case.mask, scale=scale)
    tokens = {"tokens": case.problem.q, "kv_tokens": case.problem.kv, "mask": case.mask}
    plan = "auto" if options["auto"] else case.name
    options = {"plan": plan, "backend": options["backend"], **tokens}
    answers = worlds(case.problem.ranks).run(attend, truth, options)
    assert {str(x.dtype) for out, grads in answers for x in (out, *grads)} == {f"torch.{case.problem.dtype}"}
    outs, grads = zip(*answers, strict=True)
    least, (output, gradient) = TOLERANCES[case.problem.dtype], truth.rounding_errors
    assert truth.output_error(outs) <= max(least, 4 * output)
    assert truth.gradient_error(grads) <= max(least * truth.size, 4 * gradient)


@settings(max_examples=200)
@given(**RANDOM)
def test_random_attention_equals_dense_attention(
    worlds: Worlds, case: Case, options: dict[str, Any], scale: float
) -> None:
    check_random(worlds, case, options, scale)


@pytest.mark.soak
@settings(max_examples=5000, derandomize=False, database=None, print_blob=True)
@given(**RANDOM)
def test_5000_random_attentions_equal_dense_attention(
    worlds: Worlds, case: Case, options: dict[str, Any], scale: float
) -> None:
    check_random(worlds, case, options, scale)


@pytest.mark.parametrize("size", SIZES)
def test_2047_tokens_are_like_any_other(worlds: Worlds, size: int) -> None:
    truth = Truth.of(problem(size, 2047, heads=1))
    check(truth, worlds(size).run(attend, truth, {}), 5e-6)


@pytest.mark.parametrize(("size", "plan"), ALL)
def test_float64_stays_float64_all_the_way(worlds: Worlds, size: int, plan: str) -> None:
    truth = Truth.of(problem(size, 31, dtype="float64", heads=6, kv_heads=2))
    check(truth, worlds(size).run(attend, truth, {"plan": plan}), 1e-10)


@pytest.mark.parametrize("plan", ["ulysses", "ring", "gather", "usp:2x2"])
def test_the_same_call_gives_the_same_bits(worlds: Worlds, plan: str) -> None:
    truth = Truth.of(problem(4, 31))
    first, second = (worlds(4).run(attend, truth, {"plan": plan}) for _ in range(2))
    for (out, grads), (again, grads_again) in zip(first, second, strict=True):
        assert all(error(x, y) == 0.0 for x, y in zip((out, *grads), (again, *grads_again), strict=True))
