"""Balanced partitions: heads dealt by load (and split, where one is too heavy), then blocks by ring step.

`Deals` makes and remembers them for one attention, with what the closed form wants to know of each.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from weft.core.indices import IntArray
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.problem import Problem
from weft.core.topology import Topology
from weft.plan.balance import bound
from weft.plan.blocks import Limits, joint, tile_sums
from weft.plan.counts import TileCost, head_loads, row_loads, tile_loads
from weft.plan.cuts import cut
from weft.plan.heads import natural as in_order
from weft.plan.partition import natural_roster
from weft.plan.roster import Deal, Roster, check_fit, home
from weft.plan.split import Shares, share_loads, split, whole
from weft.plan.strategy import Strategy

PAIR = 16  # the cost of a token pair; a tile's fixed cost is rounded to sixteenths of it
GOOD = 1.02  # splitting a head sends its keys once more: not for less than this
LIMITS = Limits(cap=1.1)  # a little more room than the default: with few blocks a swap moves much
BY_LOAD = ("balanced", "cuts")  # the balances that deal heads by load, and split them
DENSE_UNITS = 256  # where the mask sets no blocks, rows are cut into so many


class Deals:
    """The partitions of one attention by strategy; equal parts of their work are done once."""

    def __init__(self, problem: Problem, mask: BlockMask, topology: Topology) -> None:
        check_fit(problem, mask, Mesh.of(ring=problem.ranks))
        self.problem, self.mask, self.topology = problem, mask, topology
        flops = topology.attention_flops(sparse=not mask.is_dense)
        pair_seconds = 4 * problem.head_dim * problem.batch / flops
        self.cost = TileCost(
            pair=PAIR, tile=round(PAIR * problem.batch * topology.tile_seconds / pair_seconds)
        )
        self._unit_seconds = pair_seconds / PAIR
        self._shares: dict[int, Shares] = {}
        self._tiles: dict[Shares, IntArray] = {}
        self._deals: dict[tuple[Mesh, str], Deal] = {}

    @cached_property
    def grid(self) -> BlockMask:
        """The mask, in blocks that can be dealt."""
        if not self.mask.is_dense:
            return self.mask
        q_len, kv_len = self.mask.q_len, self.mask.kv_len
        return BlockMask.dense(self.mask.heads, q_len, kv_len, block=-(-max(q_len, kv_len) // DENSE_UNITS))

    @cached_property
    def row_loads(self) -> IntArray:
        return row_loads(self.grid, self.cost)

    def deal(self, strategy: Strategy) -> Deal:
        """The deal of a strategy; what travels does not matter to it, the place of the axes does."""
        key = strategy.mesh_on(self.topology), strategy.balance
        if key not in self._deals:
            self._deals[key] = self._deal(strategy)
        return self._deals[key]

    def _deal(self, strategy: Strategy) -> Deal:
        mesh, grid = strategy.mesh_on(self.topology), self.grid
        shares = self.shares(strategy.ulysses, by_load=strategy.balance in BY_LOAD)
        at_home = home(self.problem.q, grid.block_q, mesh), home(self.problem.kv, grid.block_k, mesh)
        rows, cols = (np.broadcast_to(x, (strategy.ulysses, x.size)) for x in at_home)
        # Where blocks stay whole rows of a slice, heads are all there is to add up.
        tiles = self.tiles(shares) if strategy.ring > 1 else self.slices(shares)
        if strategy.ring > 1 and strategy.balance == "balanced":
            rows, cols = joint(tiles, strategy.ring, *at_home, limits=LIMITS)
        elif strategy.ring > 1 and strategy.balance == "cuts":
            rows = np.broadcast_to(cut(tiles.sum(axis=(0, 2)), strategy.ring), rows.shape)
        roster = Roster(shares, rows, cols, grid.block_q, grid.block_k)
        if strategy.balance == "none":
            roster = natural_roster(self.problem, self.mask, mesh)
        moved = tuple(float((now != there).mean()) for now, there in zip((rows, cols), at_home, strict=True))
        sums = tile_sums(tiles, rows, cols, strategy.ring) if strategy.ring > 1 else tiles
        seconds = sums.astype(np.float64) * self._unit_seconds
        return Deal(roster, seconds, (moved[0], moved[1]), _needed(tiles, rows, cols, strategy.ring))

    def shares(self, groups: int, *, by_load: bool) -> Shares:
        """The heads of each Ulysses coordinate, in order or by load; a head is split where that pays."""
        plain = whole(in_order(self.problem.heads, groups))
        if not by_load:
            return plain
        if groups not in self._shares:
            loads = self.row_loads
            dealt = split(loads, groups, enough=GOOD)
            # Equally good is the same plan: it is not built and listed twice.
            better = share_loads(dealt, loads).max() < share_loads(plain, loads).max()
            self._shares[groups] = dealt if better else plain
        return self._shares[groups]

    def slices(self, shares: Shares) -> IntArray:
        """[slices, 1, 1] of cost."""
        return share_loads(shares, self.row_loads)[:, None, None]

    def tiles(self, shares: Shares) -> IntArray:
        """[slices, q units, kv units] of cost."""
        if shares not in self._tiles:
            whole = [[share.head for share in group if share.rows is None] for group in shares]
            found = tile_loads(self.grid, whole, self.cost)
            for slice_, group in enumerate(shares):
                for share in group:
                    if share.rows is not None:
                        part = tile_loads(self.grid, [[share.head]], self.cost)[0]
                        found[slice_, share.rows.array] += part[share.rows.array]
            self._tiles[shares] = found
        return self._tiles[shares]

    def bound(self, strategy: Strategy) -> float:
        """The least imbalance: whole heads have a bound, blocks and split heads hardly any."""
        loads = head_loads(self.grid, self.cost)
        return bound(loads, strategy.ulysses, splittable=strategy.balance in BY_LOAD)


def _needed(tiles: IntArray, rows: IntArray, cols: IntArray, ring: int) -> float:
    """Mean over ranks of the share of columns, held by others, that any of its tiles reads."""
    if ring == 1:
        return 0.0
    shares: list[float] = []
    for load, row, col in zip(tiles, rows, cols, strict=True):
        for rank in range(ring):
            remote = col != rank
            touched = load[row == rank].any(axis=0) & remote
            shares.append(float(touched.sum() / max(1, remote.sum())))
    return float(np.mean(shares))
