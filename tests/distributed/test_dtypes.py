"""16-bit attention over ranks, held to the error that 16 bits make in one process."""

from __future__ import annotations

import pytest
import torch

from tests.cases import kinds
from tests.distributed.jobs import Answer, Worlds, attend, problem, tiles_with_empty_rows
from tests.run.dense import Truth, error, unshard
from tests.worlds import SIZES

NARROW = ("bfloat16", "float16")
PLANS = [(size, plan) for size in SIZES for plan in kinds(size)]


def torch_error(truth: Truth) -> float:
    """How far torch's own attention in this dtype, on the whole sequence, is from the truth."""
    dtype = getattr(torch, truth.problem.dtype)
    inputs = [x.to(dtype).requires_grad_() for x in truth.whole]
    out = torch.nn.functional.scaled_dot_product_attention(*inputs, scale=truth.scale)
    grads = torch.autograd.grad(out, inputs, unshard(truth.slopes, truth.problem.q).to(dtype))
    expected, expected_grads = truth.answer
    return max(error(x, y) for x, y in zip((out, *grads), (expected, *expected_grads), strict=True))


def largest_error(truth: Truth, answers: list[Answer]) -> float:
    outs, grads = zip(*answers, strict=True)
    return max(truth.output_error(outs), truth.gradient_error(grads))


def whole(truth: Truth, answers: list[Answer]) -> list[torch.Tensor]:
    q, kv = truth.problem.q, truth.problem.kv
    outs, grads = zip(*answers, strict=True)
    return [
        unshard(x, layout)
        for x, layout in zip((outs, *zip(*grads, strict=True)), (q, q, kv, kv), strict=True)
    ]


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize(("size", "plan"), PLANS)
def test_ranks_add_next_to_no_error_to_that_of_16_bits(
    worlds: Worlds, size: int, plan: str, dtype: str
) -> None:
    truth = Truth.of(problem(size, 61, dtype=dtype, head_dim=8))
    answers = worlds(size).run(attend, truth, {"plan": plan})
    assert {x.dtype for out, grads in answers for x in (out, *grads)} == {getattr(torch, dtype)}
    assert largest_error(truth, answers) < 1.5 * torch_error(truth)


@pytest.mark.parametrize("dtype", NARROW)
def test_the_number_of_ranks_changes_16_bits_by_one_rounding_at_most(worlds: Worlds, dtype: str) -> None:
    truths = {size: Truth.of(problem(size, 60, dtype=dtype, head_dim=8)) for size in (1, *SIZES)}
    found = {size: whole(truths[size], worlds(size).run(attend, truths[size], {})) for size in SIZES}
    found[1] = whole(truths[1], [attend(truths[1], {}, rank=0)])
    ulp = torch.finfo(getattr(torch, dtype)).eps
    for size in SIZES:
        for x, alone in zip(found[size], found[1], strict=True):
            assert error(x, alone) <= ulp * alone.abs().max().item()


@pytest.mark.parametrize("dtype", NARROW)
@pytest.mark.parametrize("plan", kinds(3))
def test_16_bits_know_empty_rows_and_grouped_heads(worlds: Worlds, plan: str, dtype: str) -> None:
    mask = tiles_with_empty_rows(6, 53, 53, 8)
    truth = Truth.of(problem(3, 53, dtype=dtype, heads=6, kv_heads=2), mask)
    top = max(truth.size, truth.answer[0].abs().max().item())
    answers = worlds(3).run(attend, truth, {"plan": plan, "mask": mask})
    # Rounded once, to the nearest: half an ulp of the largest value, and a little for float32 sums.
    assert largest_error(truth, answers) < 0.51 * top * torch.finfo(getattr(torch, dtype)).eps
