"""Blocks to ring ranks: a joint refinement of rows and columns.

An assignment gives, per Ulysses slice, the ring coordinate of every q block (`rows[U, n]`) and kv block
(`cols[U, m]`); a permutation that all slices share repeats its row. Homes are the coordinates that hold
the blocks now: what is not at home has to travel.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from weft.core.indices import IntArray
from weft.plan.refine import SwapSide, refine

Blocks = tuple[IntArray, IntArray]
"""The ring coordinate of each q block and of each kv block, per slice."""


class SwapLimits(NamedTuple):
    """How far `joint` may go, and when it has gone far enough."""

    budget: float = 1 / 3
    """Largest share of the rows, and of the columns, of a slice that are away from home."""
    cap: float = 1.05
    """Most blocks of a rank, over the even share; what it has to begin with it may keep."""
    target: float = 1.013
    """A ratio with which it stops: every further swap would travel for little."""


LIMITS = SwapLimits()


def joint(
    tile_loads: IntArray,
    ring: int,
    home_rows: IntArray,
    home_cols: IntArray,
    *,
    limits: SwapLimits = LIMITS,
    start: Blocks | None = None,
) -> Blocks:
    """Rows and columns swapped together until every ring step is even, within `limits`; see `refine`.

    It begins with `start`, if that is within the budget, else with everything at home, and never ends with
    a larger step ratio than it began with. Slices have their own permutations.
    """
    slices = len(tile_loads)
    homes = home_rows, home_cols
    began: Blocks = np.tile(homes[0], (slices, 1)), np.tile(homes[1], (slices, 1))
    if start is not None and _is_near(began, start, limits.budget):
        began = start[0].astype(np.int64), start[1].astype(np.int64)  # those of a message are smaller
    if ring == 1:
        return began
    by_cols = _over_cols(tile_loads, began[1], ring)
    by_rows = _over_rows(tile_loads, began[0], ring)
    tiles = np.ascontiguousarray(_over_cols(by_rows, began[1], ring).swapaxes(1, 2))
    rows, cols = (
        SwapSide(load, sums, now, home, limits.cap, limits.budget)
        for load, sums, now, home in zip(
            (tile_loads, tile_loads.swapaxes(1, 2)), (by_cols, by_rows), began, homes, strict=True
        )
    )
    # A slice whose heads weigh more than the target allows is still made even in itself.
    mean = tiles.sum(axis=(1, 2)) / ring
    goals = np.maximum(limits.target * mean.mean(), (limits.target + 1) / 2 * mean).astype(np.int64)
    return refine(rows, cols, tiles, goals)


def _is_near(home: Blocks, start: Blocks, budget: float) -> bool:
    """Whether a start has no more away from home than the budget allows."""
    pairs = zip(start, home, strict=True)
    return all((now != at).sum(axis=1).max() <= int(budget * at.shape[1]) for now, at in pairs)


def _over_cols(tiles: IntArray, groups: IntArray, ring: int) -> IntArray:
    """[U, R, n]: tiles [U, n, m] summed over the columns of each group, groups [U, m]."""
    totals = np.zeros((len(tiles), ring, tiles.shape[1]), dtype=np.int64)
    for load, group, sums in zip(tiles, groups, totals, strict=True):
        order = np.argsort(group, kind="stable")
        there, starts = np.unique(group[order], return_index=True)
        # Contiguous groups are summed in place.
        load = load if (group[1:] >= group[:-1]).all() else load.take(order, axis=1)
        sums[there] = np.add.reduceat(load, starts, axis=1).T
    return totals


def _over_rows(tiles: IntArray, groups: IntArray, ring: int) -> IntArray:
    """[U, R, m]: tiles [U, n, m] summed over the rows of each group, groups [U, n]."""
    totals = np.empty((len(tiles), ring, tiles.shape[2]), dtype=np.int64)
    for load, group, sums in zip(tiles, groups, totals, strict=True):
        for number in range(ring):
            members = np.flatnonzero(group == number)
            run = members.size and members[-1] - members[0] == members.size - 1
            load[slice(members[0], members[-1] + 1) if run else members].sum(axis=0, out=sums[number])
    return totals
