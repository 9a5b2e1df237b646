"""Deals of heads and blocks as others have published them, for weft's planner to be compared with.

db-SP deals heads greedily too: that is `plan.heads.greedy`, from which weft's own begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.core.indices import IntArray, split_evenly
from weft.core.schedule import Schedule
from weft.plan.assignment import Assignment, assemble, home
from weft.plan.balance import ratio
from weft.plan.balanced import Balancer
from weft.plan.blocks import Blocks
from weft.plan.counts import head_loads
from weft.plan.heads import Groups, greedy, group_loads
from weft.plan.split import whole
from weft.plan.strategies import parse
from weft.schedule.usp import usp

PAST = 1.10  # the mean ratio of all layers with which db-SP plans them anew


def snake(loads: npt.ArrayLike, groups: int) -> Groups:
    """xDiT's deal: the sorted heads go round the groups forwards, then backwards, and so on."""
    dealt: list[list[int]] = [[] for _ in range(groups)]
    for place, head in enumerate(np.argsort(-np.asarray(loads), kind="stable").tolist()):
        lap, seat = divmod(place, groups)
        dealt[groups - 1 - seat if lap % 2 else seat].append(head)
    return tuple(tuple(sorted(group)) for group in dealt)


def contiguous(blocks: int, ring: int) -> IntArray:
    """Runs of blocks whose lengths differ by at most one.

    >>> contiguous(5, 2).tolist()
    [0, 0, 0, 1, 1]
    """
    return np.repeat(np.arange(ring), [stop - start for start, stop in split_evenly(blocks, ring)])


def homes(tiles: IntArray, ring: int) -> Blocks:
    """The rows and the columns of tiles [U, n, m] in their order."""
    return contiguous(tiles.shape[1], ring), contiguous(tiles.shape[2], ring)


def tile_sums(tiles: IntArray, rows: IntArray, cols: IntArray, ring: int) -> IntArray:
    """[U, R, R]: the loads between row groups and column groups, which `plan.balance` judges."""
    ranks = np.arange(ring)[:, None]
    row_in, col_in = ((groups[:, None] == ranks).astype(np.int64) for groups in (rows, cols))
    return row_in @ tiles @ col_in.swapaxes(1, 2)


def dbsp_schedule(balancer: Balancer, way: str) -> Schedule:
    """Equal counts of heads by greedy, then db-SP's biased greedy on blocks, reward 2."""
    problem, mask, strategy = balancer.problem, balancer.mask, parse(way, balancer.problem.ranks)
    heads = whole(greedy(head_loads(mask, balancer.cost), strategy.ulysses))
    homes = home(problem.q, mask.block_q, strategy.mesh), home(problem.kv, mask.block_k, strategy.mesh)
    rows, cols = dbsp_blocks(balancer.tiles(heads), strategy.ring, *homes)
    assignment = Assignment(heads, rows, cols, mask.block_q, mask.block_k)
    return usp(problem, mask, strategy.mesh, assemble(problem, mask, strategy.mesh, assignment), name="db-SP")


def dbsp_blocks(
    tile_loads: IntArray,
    ring: int,
    home_rows: IntArray | None = None,
    home_cols: IntArray | None = None,
    *,
    reward: int = 2,
) -> Blocks:
    """db-SP's: rows by row sums and columns by column sums over all heads, one permutation.

    Heaviest first, each to the least loaded rank with a free slot, where its home counts as lighter by
    `reward` times its load. Slots are equal; where blocks do not divide, the first ranks have one more.
    """
    loads = tile_loads.sum(axis=(0, 2)), tile_loads.sum(axis=(0, 1))
    homes = (
        contiguous(size, ring) if home is None else home
        for size, home in zip(tile_loads.shape[1:], (home_rows, home_cols), strict=True)
    )
    rows, cols = (_biased(*both, ring, reward) for both in zip(loads, homes, strict=True))
    return np.tile(rows, (len(tile_loads), 1)), np.tile(cols, (len(tile_loads), 1))


def _biased(loads: IntArray, homes: IntArray, ring: int, reward: int) -> IntArray:
    slots = [stop - start for start, stop in split_evenly(len(loads), ring)]
    total = [0] * ring
    dealt = np.empty_like(homes)
    for block in np.argsort(-loads, kind="stable").tolist():
        load, home = int(loads[block]), int(homes[block])
        score = {rank: total[rank] - reward * load * (rank == home) for rank in range(ring) if slots[rank]}
        rank = min(score, key=score.__getitem__)
        dealt[block] = rank
        slots[rank] -= 1
        total[rank] += load
    return dealt


class DbspPolicy:
    """db-SP's way through a denoising loop: all layers anew once their mean ratio is past `PAST`."""

    def __init__(self, plans: Sequence[Groups]) -> None:
        self.plans = tuple(plans)

    def observe(self, counts: npt.ArrayLike) -> tuple[Groups, ...]:
        """Return the plans of the next step, after one of counts [layers, heads]."""
        pairs = list(zip(self.plans, np.asarray(counts), strict=True))
        if np.mean([ratio(group_loads(plan, row)) for plan, row in pairs]) > PAST:
            self.plans = tuple(greedy(row, len(plan)) for plan, row in pairs)
        return self.plans

    def replay(self, counts: IntArray) -> npt.NDArray[np.float64]:
        """Return the ratios [steps, layers] of a recorded run, each step under the plans made before it."""
        loads: list[list[float]] = []
        for step in counts:
            pairs = zip(self.plans, step, strict=True)
            loads.append([ratio(group_loads(plan, row)) for plan, row in pairs])
            self.observe(step)
        return np.array(loads)
