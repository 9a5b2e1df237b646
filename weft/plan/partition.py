"""Partitions that follow the home layout: natural, where tokens stay put, and zigzag for causal masks."""

from __future__ import annotations

import numpy as np

from weft.core.indices import IntArray, split_evenly
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition
from weft.core.problem import Problem
from weft.plan.assignment import Assignment, assemble, check_fit, home, replicated
from weft.plan.heads import natural as in_order
from weft.plan.split import whole


def natural(problem: Problem, mask: BlockMask, mesh: Mesh) -> Partition:
    """Heads are cut evenly over `ulysses`; rows and columns stay with the ring coordinate that holds them."""
    check_fit(problem, mask, mesh)
    return assemble(problem, mask, mesh, natural_assignment(problem, mask, mesh))


def natural_assignment(problem: Problem, mask: BlockMask, mesh: Mesh) -> Assignment:
    q_unit, kv_unit = mask.units
    rows, cols = home(problem.q, q_unit, mesh), home(problem.kv, kv_unit, mesh)
    return _alike(problem, mask, mesh, rows, cols)


def zigzag(problem: Problem, mask: BlockMask, mesh: Mesh) -> Partition:
    """Ring coordinate r takes chunks r and 2·R-1-r of the sequence: equal work under a causal mask."""
    check_fit(problem, mask, mesh)
    q_unit, kv_unit = mask.units
    rows, cols = _zigzag(problem.q, q_unit, mesh), _zigzag(problem.kv, kv_unit, mesh)
    return assemble(problem, mask, mesh, _alike(problem, mask, mesh, rows, cols))


def _zigzag(layout: Layout, unit: int, mesh: Mesh) -> IntArray:
    ring, taker = mesh.size("ring"), home(layout, unit, mesh).copy()
    everywhere = replicated(layout, unit, mesh).blocks(unit).array
    dealt = np.setdiff1d(np.arange(taker.size), everywhere)
    for chunk, (start, stop) in enumerate(split_evenly(len(dealt), 2 * ring)):
        taker[dealt[start:stop]] = min(chunk, 2 * ring - 1 - chunk)
    return taker


def _alike(problem: Problem, mask: BlockMask, mesh: Mesh, rows: IntArray, cols: IntArray) -> Assignment:
    """The same rows and columns for every slice of heads."""
    slices = mesh.size("ulysses")
    return Assignment(
        whole(in_order(problem.heads, slices)),
        np.broadcast_to(rows, (slices, rows.size)),
        np.broadcast_to(cols, (slices, cols.size)),
        *mask.units,
    )
