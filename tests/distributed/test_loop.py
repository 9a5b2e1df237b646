"""Plans through a loop on real ranks: equal on all, and planned from what all have seen together."""

from __future__ import annotations

import numpy as np
import pytest
import torch.distributed as dist

from tests.distributed.jobs import Worlds
from weft.core.errors import AgreementError
from weft.core.mask import BlockMask
from weft.masks.random import random_mask
from weft.plan.blocks import Placement, contiguous
from weft.plan.heads import Grouping, greedy, group_loads, natural
from weft.plan.online import Hybrid, Online, OnlineBlocks, Plans
from weft.run.loop import Loop
from weft.run.pool import RankFailure

LAYERS, HEADS = 3, 8


def counts(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, 1000, (LAYERS, HEADS))


def run_loop(steps: int) -> list[Plans]:
    """Each rank counts its own heads only; returns the plans of every step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = np.arange(HEADS) % ranks == rank
    used: list[Plans] = []
    with Loop(Online([natural(HEADS, ranks)] * LAYERS)) as loop:
        for step in range(steps):
            used.append(loop.plans)
            loop.observe(counts(step) * mine)
        used.append(loop.plans)
    return used


def start_apart() -> None:
    first: Grouping = natural(HEADS, 2)
    other = greedy(np.arange(HEADS), 2)
    with Loop(Online([first if dist.get_rank() == 0 else other])) as loop:
        loop.observe(np.ones((1, HEADS)))


def blocks_policy(ring: int) -> OnlineBlocks:
    home = contiguous(13, ring)
    return OnlineBlocks([Hybrid(natural(HEADS, 2), Placement.at_home(2, home, home, ring))] * LAYERS)


def masks(step: int) -> list[BlockMask]:
    seeds = range(LAYERS * step, LAYERS * (step + 1))
    return [random_mask(HEADS, 200, 200, block=16, cv=0.6, seed=seed) for seed in seeds]


def run_blocks(steps: int, ahead: int) -> list[tuple[Hybrid, ...]]:
    used: list[tuple[Hybrid, ...]] = []
    with Loop(blocks_policy(2)) as loop:
        for step in range(steps):
            loop.observe(masks(step + ahead * dist.get_rank()))
            used.append(loop.plans)
    return used


def test_all_ranks_plan_the_same_blocks_from_the_masks(worlds: Worlds) -> None:
    found = worlds(2).run(run_blocks, 3, 0)
    alone = blocks_policy(2)
    assert found[0] == found[1] == [alone.observe(masks(step)) for step in range(3)]
    assert found[0][0] != found[0][1] != blocks_policy(2).plans


def test_ranks_that_have_seen_other_masks_are_told(worlds: Worlds) -> None:
    with pytest.raises(RankFailure, match="other plans or masks than rank 0") as caught:
        worlds(2).run(run_blocks, 1, 1)
    assert len(caught.value.failures) == 2


@pytest.mark.parametrize("size", [2, 4])
def test_all_ranks_plan_alike_from_everybody_s_counts(worlds: Worlds, size: int) -> None:
    found = worlds(size).run(run_loop, 4)
    assert all(plans == found[0] for plans in found)
    alone = Online([natural(HEADS, size)] * LAYERS)
    assert found[0] == [alone.plans, *(alone.observe(counts(step)) for step in range(4))]
    last = counts(3)
    for layer in range(LAYERS):
        sums = [group_loads(plan, last[layer]).max() for plan in (found[0][0][layer], found[0][-1][layer])]
        assert sums[1] <= sums[0]
    assert found[0][-1] != found[0][0]


def test_ranks_that_start_from_other_plans_are_told(worlds: Worlds) -> None:
    with pytest.raises(RankFailure, match="other plans than rank 0") as caught:
        worlds(2).run(start_apart)
    assert len(caught.value.failures) == 2
    assert AgreementError.__name__ in str(caught.value)
