"""Partitions that follow the home layout: natural, where tokens stay put, and zigzag for causal masks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.core.errors import InputError
from weft.core.indices import EMPTY, Indices, IntArray, split_evenly
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition, Work
from weft.core.problem import Problem

# Gives each unit (a block, or a token of a dense mask) the ring coordinate that takes it.
Deal = Callable[[Layout, int, IntArray], IntArray]


def natural(problem: Problem, mask: BlockMask, mesh: Mesh) -> Partition:
    """Heads are cut evenly over `ulysses`; rows and columns stay with the ring coordinate that holds them."""

    def deal(layout: Layout, unit: int, units: IntArray) -> IntArray:
        votes = np.zeros((mesh.size("ring"), -(-layout.size // unit)), dtype=np.int64)
        for rank in range(layout.ranks):
            ring = mesh.coordinate(rank).get("ring", 0)
            held = (layout.held(rank) - layout.shared).array // unit
            votes[ring] += np.bincount(held, minlength=votes.shape[1])
        return votes.argmax(axis=0)[units]

    return _partition(problem, mask, mesh, deal)


def zigzag(problem: Problem, mask: BlockMask, mesh: Mesh) -> Partition:
    """Ring coordinate r takes chunks r and 2·R-1-r of the sequence: equal work under a causal mask."""

    def deal(_layout: Layout, _unit: int, units: IntArray) -> IntArray:
        ring = mesh.size("ring")
        taker = np.empty(len(units), dtype=np.int64)
        for chunk, (start, stop) in enumerate(split_evenly(len(units), 2 * ring)):
            taker[start:stop] = min(chunk, 2 * ring - 1 - chunk)
        return taker

    return _partition(problem, mask, mesh, deal)


def _partition(problem: Problem, mask: BlockMask, mesh: Mesh, deal: Deal) -> Partition:
    check_fit(problem, mask, mesh)
    rows, spread = _cut(problem.q, 1 if mask.is_dense else mask.block_q, mesh, deal)
    cols, shared = _cut(problem.kv, 1 if mask.is_dense else mask.block_k, mesh, deal)
    # Replicated queries are work like any other: everyone takes some. Replicated keys are read in place.
    for ring, (start, stop) in enumerate(split_evenly(len(spread), mesh.size("ring"))):
        for unit in spread[start:stop]:
            rows[ring] = rows[ring] | unit
    heads = [Indices.span(*run) for run in split_evenly(problem.heads, mesh.size("ulysses"))]
    where = [mesh.coordinate(rank) for rank in range(mesh.ranks)]
    work = tuple(_work(heads[at.get("ulysses", 0)], rows[at.get("ring", 0)]) for at in where)
    in_place = Indices.from_runs(run for unit in shared for run in unit.runs)
    return Partition(work, tuple(cols[at.get("ring", 0)] for at in where), in_place)


def _cut(layout: Layout, unit: int, mesh: Mesh, deal: Deal) -> tuple[list[Indices], list[Indices]]:
    """The tokens of each ring coordinate, and the units that every rank holds whole."""
    last = -(-layout.size // unit)
    # With one ring coordinate there is nothing to deal, and replicated tokens are no special case.
    everywhere = layout.shared if mesh.size("ring") > 1 else EMPTY
    whole = [_span(u, unit, layout.size) for u in everywhere.blocks(unit)]
    whole = [tokens for tokens in whole if everywhere.covers(tokens)]
    taken = Indices.from_runs(run for tokens in whole for run in tokens.runs).blocks(unit)
    units = (Indices.span(0, last) - taken).array
    taker = deal(layout, unit, units)
    found: list[Indices] = []
    for ring in range(mesh.size("ring")):
        blocks = Indices.of(units[taker == ring].tolist())
        found.append(Indices(tuple((a * unit, min(b * unit, layout.size)) for a, b in blocks.runs)) or EMPTY)
    return found, whole


def _span(block: int, unit: int, size: int) -> Indices:
    return Indices.span(block * unit, min((block + 1) * unit, size))


def _work(heads: Indices, rows: Indices) -> tuple[Work, ...]:
    return (Work(heads, rows),) if heads and rows else ()


def check_fit(problem: Problem, mask: BlockMask, mesh: Mesh) -> None:
    """The mesh and the mask must be those of the problem."""
    if mesh.ranks != problem.ranks:
        raise InputError(
            f"The mesh {mesh} has {mesh.ranks} ranks, the tensors lie on {problem.ranks}.",
            hint=f"Use axes whose product is {problem.ranks}.",
        )
    if unknown := {name for name, _ in mesh.axes} - {"ring", "ulysses"}:
        raise InputError(
            f"This strategy knows no mesh axis {sorted(unknown)[0]!r}.",
            hint="Use ring and ulysses.",
        )
    given = (mask.heads, mask.q_len, mask.kv_len)
    wanted = (problem.heads, problem.q.size, problem.kv.size)
    if given != wanted:
        raise InputError(
            "The mask is for {} heads, {} × {} tokens; ".format(*given)
            + "the tensors have {} heads, {} × {} tokens.".format(*wanted),
            hint="Make the mask for the whole sequence, text included, not for one rank's shard.",
        )
