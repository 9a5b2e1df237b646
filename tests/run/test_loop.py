"""A loop of one rank: it plans in a thread of its own, and what goes wrong there is told."""

import threading

import numpy as np
import pytest

from weft.masks.random import random_mask
from weft.plan.blocks import Placement, contiguous
from weft.plan.heads import natural
from weft.plan.online import Hybrid, Online, OnlineBlocks
from weft.run.loop import Loop


class Failing:
    plans = ((natural(4, 2)),)

    def observe(self, counts):
        raise ArithmeticError(f"{counts.sum()} is too much")


def test_it_plans_as_the_policy_does_in_a_thread_that_ends_with_it():
    counts = np.random.default_rng(0).integers(1, 99, (3, 2, 6))
    front = Online([natural(6, 2)] * 2)
    with Loop(Online([natural(6, 2)] * 2)) as loop:
        for table in counts:
            assert loop.plans == front.plans
            loop.observe(table)
            front.observe(table)
            assert loop.counts.tolist() == table.tolist()
        assert loop.plans == front.plans
    assert not any(thread.name.startswith("weft-plan") for thread in threading.enumerate())


def test_an_error_of_the_thread_is_raised_where_its_plan_is_asked_for():
    with Loop(Failing()) as loop:
        loop.observe(np.full((1, 4), 5))
        with pytest.raises(ArithmeticError, match="20 is too much"):
            _ = loop.plans


def test_it_plans_blocks_from_masks():
    homes = contiguous(7, 3), contiguous(7, 3)
    start = [Hybrid(natural(4, 2), Placement.at_home(2, *homes, 3))]
    front = OnlineBlocks(start)
    with Loop(OnlineBlocks(start)) as loop:
        for seed in range(3):
            masks = [random_mask(4, 100, 100, block=16, density=0.4, cv=0.5, seed=seed)]
            loop.observe(masks)
            assert loop.plans == front.observe(masks)
    assert front.replanned
