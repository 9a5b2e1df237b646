"""Renewed masks are those of the tiles, and the lists that are timed are all that a forward reads."""

from typing import Any

import numpy as np
import pytest

from bench import renewal
from bench.dry import DryRun
from weft.core.mask import AnyMask
from weft.plan.choose import build

TOKENS, HEADS, BLOCK = 600, 8, 16


@pytest.fixture
def tiles():
    return renewal.drifting(BLOCK, 3, TOKENS, HEADS)


def test_masks_drift_by_a_twentieth_a_step_and_heads_differ(tiles):
    assert all(each.shape == (HEADS, 38, 38) for each in tiles)
    assert all((each.sum(axis=2).std(axis=1) == 0).all() for each in tiles)  # the k best of each row
    densities = tiles[0].mean(axis=(1, 2))
    assert densities.std() / densities.mean() > 0.2
    gone = (tiles[0] & ~tiles[1]).sum() / tiles[0].sum()
    assert 0.02 < gone < 0.12


@pytest.mark.parametrize("way", ["ulysses+balanced", "usp:2x2+balanced"])
def test_what_is_timed_makes_the_lists_of_every_tile_once(tiles, way, monkeypatch):
    monkeypatch.setattr(renewal, "TOKENS", TOKENS)
    problem = renewal.problem_of(4, TOKENS, HEADS)
    schedule = build(way, problem, AnyMask.like(renewal.mask_of(tiles[0], BLOCK, TOKENS)))
    listed = 0
    for rank in range(4):
        spent, executor = renewal.renewed(DryRun(schedule, rank).executor, tiles[1], BLOCK, TOKENS)
        assert min(spent) >= 0 and np.array_equal(executor.tiles.mask.tiles, tiles[1])
        for op in renewal.attends(executor):
            active = executor.tiles.of(op)
            assert ("lists", renewal.HOST) in active._made
            listed += active.lists(renewal.HOST).kv.shape[0]
    assert listed == tiles[1].sum()
    assert renewal.inverted(executor) >= 0
    lists = [executor.tiles.of(op).lists(renewal.HOST) for op in renewal.attends(executor)]
    assert all("inverted" in vars(each) for each in lists)


def test_the_row_is_the_worst_rank_and_a_slow_one_misses_the_bar():
    renewals = [[renewal.Renewal(1, 1, 1)] * 3, [renewal.Renewal(5, 5, 9)] * 3]
    row, plan = _rows(renewals, beside=51)
    assert (row.measured, row.holds) == (19, False) and "11.0" in row.bar
    assert (plan.measured, plan.holds) == (51, False)
    row, plan = _rows([[renewal.Renewal(1, 1, 1)] * 3], beside=49)
    assert row.holds and plan.holds


def _rows(renewals, beside):
    plan: Any = None  # the same one: nothing to change to
    changes = [renewal.Changes(0.1, beside, plan)] * 2
    return renewal._report("case", 128, renewals, [1.0], changes).rows
