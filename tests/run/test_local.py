"""The local executor, which is the oracle of the others, against attention written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.cases import Case, cases
from tests.run.dense import Truth
from weft.core.errors import ScheduleError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.plan.choose import build
from weft.run.local import run_local


def locally(schedule: Schedule, truth: Truth) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Outputs and gradients (dq, dk, dv) by rank, by plain autograd."""
    ranks = range(schedule.problem.ranks)
    inputs = [[x.requires_grad_() for x in truth.inputs(rank)] for rank in ranks]
    q, k, v = (list(shards) for shards in zip(*inputs, strict=True))
    outs = run_local(schedule, q, k, v, truth.scale)
    active = [rank for rank in ranks if outs[rank].requires_grad]  # not where no tile is
    slopes = [truth.slope(rank) for rank in active]
    torch.autograd.backward([outs[rank] for rank in active], slopes)
    grads = [[torch.zeros_like(x) if x.grad is None else x.grad for x in shards] for shards in inputs]
    return [out.detach() for out in outs], grads


@settings(max_examples=300)
@given(case=st.one_of(cases(47), cases()))
def test_any_schedule_run_locally_equals_dense_attention(case: Case) -> None:
    truth = Truth.of(case.problem, case.mask)
    outs, grads = locally(case.schedule, truth)
    assert truth.output_error(outs) < 1e-10
    assert truth.gradient_error(grads) < 1e-10


@pytest.mark.parametrize("name", ["ulysses", "ring", "zigzag", "gather"])
def test_2047_tokens_on_5_ranks_are_like_any_other(name: str) -> None:
    tokens = Layout.even(2047, 5)
    problem = Problem(batch=1, heads=2, kv_heads=1, head_dim=3, q=tokens, kv=tokens, dtype="float64")
    truth = Truth.of(problem)
    outs, grads = locally(build(name, problem, truth.mask), truth)
    assert truth.output_error(outs) < 1e-10
    assert truth.gradient_error(grads) < 1e-10


def test_a_piece_that_never_came_is_missed_by_name() -> None:
    tokens = Layout.even(7, 2)
    problem = Problem(batch=1, heads=1, kv_heads=1, head_dim=2, q=tokens, kv=tokens, dtype="float64")
    whole = build("ring", problem, BlockMask.dense(1, 7))
    silent = Schedule(whole.name, problem, whole.mask, whole.mesh, tuple(op for _, op in whole.attends()))
    with pytest.raises(ScheduleError, match=r"Rank \d does not have kv"):
        locally(silent, Truth.of(problem))
