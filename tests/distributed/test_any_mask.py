"""One schedule for masks that change: outputs and gradients of each, and masks that must not differ."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import weft
from tests.cases import machines
from tests.run.dense import Truth
from tests.worlds import world
from weft.core.layout import Layout
from weft.core.mask import AnyMask, BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.plan.choose import build
from weft.run.attention import MAX_MASKS
from weft.run.spawn.pool import RankFailure
from weft.run.world import world_of
from weft.schedule.verify import verify

TOKENS, HEADS, BLOCK = 61, 4, 8
PLANS = ("ring", "ulysses", "gather", "usp:2x2", "usp:2x2+balanced", "torus:2x2")


def problem() -> Problem:
    layout = Layout.even(TOKENS, 4, prefix=5)
    return Problem(batch=1, heads=HEADS, kv_heads=2, head_dim=8, q=layout, kv=layout, dtype="float64")


@cache
def mask(seed: int) -> BlockMask:
    """Rows without keys in most; all tiles in the one of seed 3; none at all in that of seed 4."""
    blocks = -(-TOKENS // BLOCK)
    tiles = np.random.default_rng(seed).random((HEADS, blocks, blocks)) < {3: 1.1, 4: 0.0}.get(seed, 0.3)
    return BlockMask.from_tiles(tiles, q_len=TOKENS, kv_len=TOKENS, block_q=BLOCK)


@cache
def schedule(name: str) -> Schedule:
    return build(name, problem(), AnyMask.like(mask(0)), machines(4))


@pytest.mark.parametrize("name", PLANS)
def test_a_schedule_for_any_mask_is_proved_for_each(name: str) -> None:
    from dataclasses import replace

    for seed in range(5):
        verify(replace(schedule(name), mask=mask(seed)))


def runs(name: str, rank: int) -> list[tuple[float, list[torch.Tensor], int]]:
    plan = schedule(name)
    found = []
    for seed in (0, 1, 2, 3, 4, 1):
        truth = Truth.of(problem(), mask(seed))
        leaves = [x.requires_grad_() for x in truth.inputs(rank)]
        out = weft.attention(*leaves, mask=mask(seed), plan=plan, scale=truth.scale)
        out.backward(truth.slope(rank))
        grads = [x.grad for x in leaves if x.grad is not None]
        found.append((truth.output_error_of(out.detach(), rank), grads, len(world_of(None, 60.0).executors)))
    return found


@pytest.mark.parametrize("name", PLANS)
def test_masks_that_change_share_one_executor_and_are_exact(name: str) -> None:
    results = world(4).run(runs, name, per_rank=[(rank,) for rank in range(4)])
    for number, seed in enumerate((0, 1, 2, 3, 4, 1)):
        errors, grads, executors = zip(*(each[number] for each in results), strict=True)
        assert max(errors) < 1e-10
        assert Truth.of(problem(), mask(seed)).gradient_error(grads) < 1e-10
        assert set(executors) == {results[0][0][2]}, "a new mask makes no new executor"


def of_rank(rank: int, wrong: str) -> None:
    truth = Truth.of(problem(), mask(0))
    for seed in (0, 1) if wrong == "known" else ():
        weft.attention(*truth.inputs(rank), mask=mask(seed), plan=schedule("ring"), scale=0.1)
    given: BlockMask | None = mask(rank // 3)  # the last rank's differs
    if wrong == "grid":
        given = BlockMask.dense(HEADS, TOKENS, block=BLOCK // 2)
    elif wrong == "missing":
        given = None
    weft.attention(*truth.inputs(rank), mask=given, plan=schedule("ring"), scale=0.1)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("rank", "rank 3 has mask"),
        ("known", "rank 3 has mask"),
        ("grid", "in blocks of 8 × 8"),
        ("missing", "mask is None"),
    ],
)
def test_a_mask_that_differs_or_does_not_fit_raises_on_every_rank(wrong: str, says: str) -> None:
    with pytest.raises(RankFailure) as failed:
        world(4).run(of_rank, per_rank=[(rank, wrong) for rank in range(4)])
    assert len(failed.value.failures) == 4
    assert all(says in failure.message for failure in failed.value.failures.values())


def many() -> tuple[int, int]:
    layout = Layout.even(TOKENS, 1)
    alone = Problem(batch=1, heads=HEADS, kv_heads=HEADS, head_dim=8, q=layout, kv=layout, dtype="float64")
    plan = build("ring", alone, AnyMask.like(mask(0)))
    q, k, v = (torch.randn(1, HEADS, TOKENS, 8, dtype=torch.float64) for _ in range(3))
    for seed in range(20, 20 + 2 * MAX_MASKS):
        weft.attention(q, k, v, mask=mask(seed), plan=plan)
    executors = [each for each in world_of(None, 60.0).executors.values() if each.masked]
    return len(executors), max(len(each.masked) for each in executors)


def test_masks_of_old_are_let_go() -> None:
    executors, masks = many()
    assert executors >= 1 and masks == MAX_MASKS
