"""Balanced partitions: heads dealt by load (and split, where one is too heavy), then blocks by ring step.

`Balancer` makes and remembers them for one attention, with what the closed form wants to know of each.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import numpy.typing as npt

from weft.core.indices import IntArray
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.problem import Problem
from weft.core.topology import Topology
from weft.plan.assignment import (
    Assignment,
    AssignmentCost,
    check_fit,
    home,
    natural_assignment,
    zigzag_assignment,
)
from weft.plan.balance import bound, ratio, step_ratio
from weft.plan.blocks import SwapLimits, joint
from weft.plan.counts import TileCost, head_loads, row_loads, tile_loads
from weft.plan.cuts import cut
from weft.plan.heads import natural as in_order
from weft.plan.split import HeadPart, Heads, part_loads, split, whole
from weft.plan.strategy import Strategy

PAIR_COST = 16  # the cost of a token pair; a tile's fixed cost is rounded to sixteenths of it
SPLIT_TOLERANCE = 1.02  # a smaller gain does not pay for sending a split head's keys once more
RESPLIT_TOLERANCE = 1.003  # of masks that change: a step's forecast is nearer than that
SPLIT_TOLERANCE_BETWEEN_MACHINES = (
    1.1  # of several machines: sending a head's keys once more takes a tenth of an attention
)
HEAD_DRIFT = 1.003  # reassigning heads moves no additional data
BLOCK_DRIFT = 1.015  # higher for blocks: those that stay at home need not be sent
SWAP_LIMITS = SwapLimits(cap=1.1)  # a little more room than the default: with few blocks a swap moves much
LOAD_BALANCES = ("balanced", "cuts")  # the balances that assign heads by load, and split them
DENSE_UNITS = 256  # where the mask sets no blocks, rows are cut into so many


class Balancer:
    """The assignments of one attention by strategy; equal parts of the work are done once."""

    def __init__(self, problem: Problem, mask: BlockMask, topology: Topology) -> None:
        check_fit(problem, mask, Mesh.of(ring=problem.ranks))
        self.problem, self.mask, self.topology = problem, mask, topology
        flops = topology.attention_flops(sparse=not mask.is_dense)
        pair_seconds = 4 * problem.head_dim * problem.batch / flops
        self.cost = TileCost(
            pair=PAIR_COST, tile=round(PAIR_COST * problem.batch * topology.tile_seconds / pair_seconds)
        )
        self._unit_seconds = pair_seconds / PAIR_COST
        self._heads: dict[int, Heads] = {}
        self._tiles: dict[Heads, IntArray] = {}
        self._assigned: dict[tuple[Mesh, str], AssignmentCost] = {}

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

    def assign(self, strategy: Strategy) -> AssignmentCost:
        """Assign by a strategy; what travels does not matter to it, the place of the axes does."""
        key = strategy.mesh_on(self.topology), strategy.balance
        if key not in self._assigned:
            self._assigned[key] = self.cost_of(strategy, self.assignment(strategy))
        return self._assigned[key]

    def assignment(self, strategy: Strategy) -> Assignment:
        """Make the assignment of a strategy, without its cost."""
        mesh, grid = strategy.mesh_on(self.topology), self.grid
        if strategy.balance == "none":
            return natural_assignment(self.problem, self.mask, mesh)
        if strategy.balance == "zigzag":
            return zigzag_assignment(self.problem, self.mask, mesh)
        heads = self.heads(strategy.ulysses)
        rows, cols = (np.broadcast_to(x, (strategy.ulysses, x.size)) for x in self._home(mesh))
        if strategy.ring > 1 and strategy.balance == "balanced":
            rows, cols = joint(self.tiles(heads), strategy.ring, *self._home(mesh), limits=SWAP_LIMITS)
        elif strategy.ring > 1 and strategy.balance == "cuts":
            rows = np.broadcast_to(cut(self.tiles(heads).sum(axis=(0, 2)), strategy.ring), rows.shape)
        return Assignment(heads, rows, cols, grid.block_q, grid.block_k)

    def assign_by(self, strategy: Strategy, shares: npt.NDArray[np.float64]) -> Assignment:
        """Assign by the share of its keys that each head computes, whatever this mask is; blocks stay."""
        grid, mesh = self.grid, strategy.mesh_on(self.topology)
        rows, cols = (np.broadcast_to(x, (strategy.ulysses, x.size)) for x in self._home(mesh))
        heads = whole(in_order(self.problem.heads, strategy.ulysses))
        if strategy.balance in LOAD_BALANCES:
            loads = np.rint(shares[:, None] * grid.row_sizes * grid.kv_len * PAIR_COST).astype(np.int64)
            heads = split(loads, strategy.ulysses, enough=self._enough(RESPLIT_TOLERANCE))
        return Assignment(heads, rows, cols, grid.block_q, grid.block_k)

    def renew(self, strategy: Strategy, now: Assignment, expected: IntArray | None = None) -> Assignment:
        """Reassign the heads and blocks of `now` that are out of balance on this mask; keep the others.

        `expected` are forecast loads [heads] of the next step, used instead of the loads of this mask.
        """
        loads = self.row_loads
        if expected is not None:
            scale = expected / np.maximum(1, loads.sum(axis=1))
            loads = np.rint(loads * (scale / scale.min())[:, None]).astype(np.int64)
        heads = now.heads
        if ratio(part_loads(heads, loads)) > HEAD_DRIFT:
            better = split(loads, strategy.ulysses, enough=self._enough(RESPLIT_TOLERANCE))
            if part_loads(better, loads).max() < part_loads(heads, loads).max():
                heads = better
        rows, cols = now.rows, now.cols
        ring = strategy.ring
        if ring > 1 and step_ratio(self._sums(heads, rows, cols, ring)[0]) > BLOCK_DRIFT:
            at_home = self._home(strategy.mesh_on(self.topology))
            rows, cols = joint(self.tiles(heads), ring, *at_home, limits=SWAP_LIMITS, start=(rows, cols))
        renewed = Assignment(heads, rows, cols, now.q_unit, now.kv_unit)
        return now if renewed == now else renewed

    def cost_of(self, strategy: Strategy, assignment: Assignment) -> AssignmentCost:
        """What an assignment costs on this mask, whichever mask it was made for."""
        mesh, ring = strategy.mesh_on(self.topology), strategy.ring
        heads, rows, cols = assignment.heads, assignment.rows, assignment.cols
        at_home = self._home(mesh)
        if strategy.balance == "none":  # in units of the mask, though tokens of dense ones are not
            rows, cols = (np.broadcast_to(x, (strategy.ulysses, x.size)) for x in at_home)
        # Where blocks stay whole rows of a slice, heads are all there is to add up.
        sums, needed = part_loads(heads, self.row_loads)[:, None, None], 0.0
        if ring > 1:
            sums, needed = self._sums(heads, rows, cols, ring)
        moved = tuple(float((now != there).mean()) for now, there in zip((rows, cols), at_home, strict=True))
        seconds = sums.astype(np.float64) * self._unit_seconds
        return AssignmentCost(assignment, seconds, (moved[0], moved[1]), needed)

    def _sums(self, heads: Heads, rows: IntArray, cols: IntArray, ring: int) -> tuple[IntArray, float]:
        """Return loads [slices, row groups, column groups], and the share of others' keys that a rank reads.

        The same as `tile_sums` of `tiles`, without that table.
        """
        totals = np.empty((len(heads), ring, ring), dtype=np.int64)
        shares: list[float] = []
        for sums, group, row, col in zip(totals, heads, rows, cols, strict=True):
            loads = self._row_sums(group, row, ring)
            for rank in range(ring):
                there = col == rank
                sums[:, rank] = loads[:, there].sum(axis=1)
                shares.append(float((loads[rank, ~there] > 0).sum() / max(1, (~there).sum())))
        return totals, float(np.mean(shares))

    def _row_sums(self, group: tuple[HeadPart, ...], rows: IntArray, ring: int) -> IntArray:
        """[row groups, kv units]: the loads of a slice; only the last of its rows may have another size."""
        grid = self.grid
        inner, last = self.cost.of(grid.row_sizes[[0, -1]], grid.col_sizes)
        sums = np.zeros((ring, grid.kv_blocks), dtype=np.int64)
        uncut = [blocks.head for blocks in group if blocks.rows is None]
        for heads, blocks in [(uncut, None), *(([p.head], p.rows) for p in group if p.rows is not None)]:
            counts = grid.counts(heads)
            taken = rows
            if blocks is not None:
                taken = np.full(rows.shape, ring)  # unassigned
                taken[blocks.array] = rows[blocks.array]
            for rank in range(ring):
                sums[rank] += counts[:-1][taken[:-1] == rank].sum(axis=0, dtype=np.int64) * inner
            if taken[-1] < ring:
                sums[taken[-1]] += counts[-1] * last
        return sums

    def _home(self, mesh: Mesh) -> tuple[IntArray, IntArray]:
        """The ring coordinates that hold the blocks of queries and of keys."""
        grid = self.grid
        return home(self.problem.q, grid.block_q, mesh), home(self.problem.kv, grid.block_k, mesh)

    def heads(self, groups: int) -> Heads:
        """The heads of each Ulysses coordinate, assigned by load; a head is split where that pays."""
        if groups not in self._heads:
            plain, loads = whole(in_order(self.problem.heads, groups)), self.row_loads
            better = split(loads, groups, enough=self._enough(SPLIT_TOLERANCE))
            # Equally good is the same plan: it is not built and listed twice.
            is_better = part_loads(better, loads).max() < part_loads(plain, loads).max()
            self._heads[groups] = better if is_better else plain
        return self._heads[groups]

    def _enough(self, near: float) -> float:
        """Return the imbalance from which heads are split."""
        return near if self.topology.machines == 1 else max(near, SPLIT_TOLERANCE_BETWEEN_MACHINES)

    def tiles(self, heads: Heads) -> IntArray:
        """[slices, q units, kv units] of cost."""
        if heads not in self._tiles:
            uncut = [[piece.head for piece in group if piece.rows is None] for group in heads]
            table = tile_loads(self.grid, uncut, self.cost)
            for slice_, group in enumerate(heads):
                for piece in group:
                    if piece.rows is not None:
                        loads = tile_loads(self.grid, [[piece.head]], self.cost)[0]
                        table[slice_, piece.rows.array] += loads[piece.rows.array]
            self._tiles[heads] = table
        return self._tiles[heads]

    def bound(self, strategy: Strategy) -> float:
        """The least imbalance: whole heads have a bound, blocks and split heads hardly any."""
        loads = head_loads(self.grid, self.cost)
        return bound(loads, strategy.ulysses, splittable=strategy.balance in LOAD_BALANCES)
