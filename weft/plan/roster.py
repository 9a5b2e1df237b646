"""Roster: which Ulysses coordinate takes each head, and which ring coordinate each block; as a Partition."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.indices import EMPTY, Indices, IntArray, split_evenly
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition, Work
from weft.core.problem import Problem
from weft.plan.split import Share, Shares


@dataclass(frozen=True, eq=False)
class Roster:
    """Per Ulysses coordinate, its shares of heads and the ring coordinate of every unit of tokens.

    A unit is a block of the mask; where the mask is dense it may be any number of tokens.
    """

    shares: Shares
    rows: IntArray
    """[ulysses, q units]"""
    cols: IntArray
    """[ulysses, kv units]"""
    q_unit: int
    kv_unit: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for rosters that deal alike."""
        return self.shares, self.rows.tobytes(), self.cols.tobytes(), self.q_unit, self.kv_unit

    @property
    def widest(self) -> float:
        """The slice that has most heads, whole or in part, over the mean of whole heads."""
        counts = [len(group) for group in self.shares]
        heads = {share.head for group in self.shares for share in group}
        return max(counts) * len(counts) / len(heads)


@dataclass(frozen=True, eq=False)
class Deal:
    """A roster, the seconds of slice u between row group a and column group b, and what moves."""

    roster: Roster
    seconds: npt.NDArray[np.float64]
    moved: tuple[float, float]
    """Shares of rows and of columns that leave the ring coordinate that holds them."""
    needed: float
    """The share of the other ring coordinates' keys that a rank's tiles touch."""


@lru_cache(maxsize=64)
def home(layout: Layout, unit: int, mesh: Mesh) -> IntArray:
    """The ring coordinate that holds most of each unit; units that all hold are dealt evenly in order."""
    size = -(-layout.size // unit)
    votes = np.zeros((mesh.size("ring"), size), dtype=np.int64)
    for rank in range(layout.ranks):
        ring = mesh.coordinate(rank).get("ring", 0)
        held = (layout.held(rank) - layout.shared).array // unit
        votes[ring] += np.bincount(held, minlength=size)
    found = votes.argmax(axis=0)
    whole = replicated(layout, unit, mesh).blocks(unit).array
    for ring, (start, stop) in enumerate(split_evenly(len(whole), mesh.size("ring"))):
        found[whole[start:stop]] = ring
    found.setflags(write=False)  # it is remembered
    return found


def replicated(layout: Layout, unit: int, mesh: Mesh) -> Indices:
    """The tokens of units that every rank holds whole; none, where one ring coordinate has everything."""
    if mesh.size("ring") == 1:
        return EMPTY
    shared = layout.shared
    spans = [(u * unit, min((u + 1) * unit, layout.size)) for u in shared.blocks(unit)]
    return Indices.from_runs(span for span in spans if shared.covers(Indices.span(*span)))


def assemble(problem: Problem, mask: BlockMask, mesh: Mesh, given: Roster) -> Partition:
    """The partition of a roster. Replicated keys are read in place, so nobody brings them."""
    check_fit(problem, mask, mesh)
    in_place = replicated(problem.kv, given.kv_unit, mesh)
    rows = _tokens(given.rows, given.q_unit, problem.q.size, mesh)
    cols = [
        [tokens - in_place for tokens in ring]
        for ring in _tokens(given.cols, given.kv_unit, problem.kv.size, mesh)
    ]
    work: list[tuple[Work, ...]] = []
    brought: list[Indices] = []
    for rank in range(mesh.ranks):
        at = mesh.coordinate(rank)
        slice_, ring = at.get("ulysses", 0), at.get("ring", 0)
        work.append(_work(given.shares[slice_], rows[slice_][ring], given.q_unit, problem.q.size))
        brought.append(cols[slice_][ring])
    return Partition(tuple(work), tuple(brought), in_place)


def _tokens(taker: IntArray, unit: int, size: int, mesh: Mesh) -> list[list[Indices]]:
    """By Ulysses and ring coordinate, the tokens of the units that go there."""
    found: list[list[Indices]] = []
    for slice_, row in enumerate(taker):
        if slice_ and np.array_equal(row, taker[slice_ - 1]):
            found.append(found[-1])
            continue
        # Runs are found where the taker changes, not by asking every token: dense masks have a million.
        edges = np.flatnonzero(np.diff(row)) + 1
        runs: list[list[tuple[int, int]]] = [[] for _ in range(mesh.size("ring"))]
        for start, stop in pairwise([0, *edges.tolist(), len(row)]):
            runs[int(row[start])].append((start * unit, min(stop * unit, size)))
        here = [Indices(tuple(run)) for run in runs]
        found.append(here)
    return found


def _work(shares: tuple[Share, ...], rows: Indices, unit: int, size: int) -> tuple[Work, ...]:
    """Whole heads are one work; each part of a head is another."""
    found: dict[Indices, Indices] = {}
    for share in shares:
        mine = rows
        if share.rows is not None:
            mine = rows & Indices(tuple((a * unit, min(b * unit, size)) for a, b in share.rows.runs))
        found[mine] = found.get(mine, EMPTY) | Indices.span(share.head, share.head + 1)
    return tuple(Work(heads, mine) for mine, heads in found.items() if mine)


def check_fit(problem: Problem, mask: BlockMask, mesh: Mesh) -> None:
    """The mesh and the mask must be those of the problem."""
    if mesh.ranks != problem.ranks:
        raise InputError(
            f"The mesh {mesh} has {mesh.ranks} ranks, the tensors lie on {problem.ranks}.",
            hint=f"Use axes whose product is {problem.ranks}.",
        )
    if unknown := {name for name, _ in mesh.axes} - {"ring", "ulysses"}:
        raise InputError(
            f"This strategy knows no mesh axis {sorted(unknown)[0]!r}.", hint="Use ring and ulysses."
        )
    given = (mask.heads, mask.q_len, mask.kv_len)
    wanted = (problem.heads, problem.q.size, problem.kv.size)
    if given != wanted:
        raise InputError(
            "The mask is for {} heads, {} × {} tokens; ".format(*given)
            + "the tensors have {} heads, {} × {} tokens.".format(*wanted),
            hint="Make the mask for the whole sequence, text included, not for one rank's shard.",
        )
