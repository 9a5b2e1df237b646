"""Balancer of heads and blocks as others have published them, for weft's planner to be compared with.

db-SP balancer heads greedily too: that is `plan.heads.greedy`, from which weft's own begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from weft.plan.online import Plans, Policy, ratios

from weft.core.indices import IntArray, split_evenly
from weft.core.schedule import Schedule
from weft.plan.assignment import Assignment, assemble, home
from weft.plan.balanced import Balancer
from weft.plan.blocks import Dealt, contiguous
from weft.plan.counts import head_loads
from weft.plan.heads import Groups, greedy
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


def dbsp_schedule(balancer: Balancer, way: str) -> Schedule:
    """Equal counts of heads by greedy, then db-SP's biased greedy on blocks, reward 2."""
    problem, mask, strategy = balancer.problem, balancer.mask, parse(way, balancer.problem.ranks)
    shares = whole(greedy(head_loads(mask, balancer.cost), strategy.ulysses))
    homes = home(problem.q, mask.block_q, strategy.mesh), home(problem.kv, mask.block_k, strategy.mesh)
    rows, cols = dbsp_blocks(balancer.tiles(shares), strategy.ring, *homes)
    assignment = Assignment(shares, rows, cols, mask.block_q, mask.block_k)
    return usp(problem, mask, strategy.mesh, assemble(problem, mask, strategy.mesh, assignment), name="db-SP")


def dbsp_blocks(
    tile_loads: IntArray,
    ring: int,
    home_rows: IntArray | None = None,
    home_cols: IntArray | None = None,
    *,
    reward: int = 2,
) -> Dealt:
    """db-SP's: rows by row sums and columns by column sums over all heads, one permutation.

    Heaviest first, each to the least loaded rank with a free slot, where its home counts as lighter by
    `reward` times its load. Slots are equal; where blocks do not divide, the first ranks have one more.
    """
    loads = tile_loads.sum(axis=(0, 2)), tile_loads.sum(axis=(0, 1))
    homes = (
        contiguous(size, ring) if home is None else home
        for size, home in zip(tile_loads.shape[1:], (home_rows, home_cols), strict=True)
    )
    dealt = [_biased(*both, ring, reward) for both in zip(loads, homes, strict=True)]
    return Dealt(*(np.tile(groups, (len(tile_loads), 1)) for groups in dealt))


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
        self.plans: Plans = tuple(plans)

    def observe(self, counts: IntArray) -> Plans:
        if ratios(self.plans, counts).mean() > PAST:
            pairs = zip(self.plans, counts, strict=True)
            self.plans = tuple(greedy(row, len(plan)) for plan, row in pairs)
        return self.plans


def replay(policy: Policy, counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """[steps, layers]: the ratio of each layer in each step of a recorded run, under plans made before it."""
    found: list[npt.NDArray[np.float64]] = []
    for step in np.asarray(counts):
        found.append(ratios(policy.plans, step))
        policy.observe(step)
    return np.stack(found)
