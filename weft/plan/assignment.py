"""Assignment: the Ulysses coordinate of each head and the ring coordinate of each block; as a Partition."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from weft.core.codec import Value
from weft.core.errors import InputError
from weft.core.indices import EMPTY, Indices, IntArray, split_evenly
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition, WorkItem
from weft.core.problem import Problem
from weft.plan.heads import natural as natural_groups
from weft.plan.split import HeadPart, Heads, whole

if TYPE_CHECKING:
    from weft.plan.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Assignment(Value):
    """Per Ulysses coordinate, its heads (whole or in part) and the ring coordinate of every unit of tokens.

    A unit is a block of the mask; where the mask is dense it may be any number of tokens.
    """

    heads: Heads
    rows: IntArray
    """[ulysses, q units]"""
    cols: IntArray
    """[ulysses, kv units]"""
    q_unit: int
    kv_unit: int

    def __post_init__(self) -> None:
        for name in ("rows", "cols"):
            groups = getattr(self, name)
            if groups.ndim != 2 or groups.dtype.kind not in "iu" or len(groups) != len(self.heads):
                raise InputError(
                    f"{name} of an assignment are {groups.dtype} of shape {groups.shape}.",
                    hint=f"Pass integers [{len(self.heads)}, units], one row for each group of heads.",
                )

    def fits(self, problem: Problem, mask: BlockMask, strategy: Strategy) -> bool:
        """Whether it assigns every head and every block of an attention, each once, to ranks that exist."""
        units = [(self.rows, self.q_unit, problem.q.size), (self.cols, self.kv_unit, problem.kv.size)]
        return (
            (self.q_unit, self.kv_unit) == (mask.block_q, mask.block_k)
            and len(self.heads) == strategy.ulysses
            and _is_whole(self.heads, problem.heads, self.rows.shape[1])
            and all(
                groups.shape[1] == -(-size // unit) and groups.min() >= 0 and groups.max() < strategy.ring
                for groups, unit, size in units
            )
        )

    def moved(self, before: Assignment) -> float:
        """Return the share of blocks whose ring coordinate changed; 1 if the mesh changed."""
        pairs = [(self.rows, before.rows), (self.cols, before.cols)]
        if any(now.shape != then.shape for now, then in pairs):
            return 1.0
        return float(np.mean([(now != then).mean() for now, then in pairs]))

    def packed(self) -> Assignment:
        """Return a copy in the smallest dtypes, to be sent and stored."""
        rows, cols = (x.astype(np.min_scalar_type(int(x.max(initial=0)))) for x in (self.rows, self.cols))
        return replace(self, rows=rows, cols=cols)

    @cached_property
    def _key(self) -> tuple[object, ...]:
        arrays = (x.astype(np.int64).tobytes() for x in (self.rows, self.cols))
        return self.heads, *arrays, self.q_unit, self.kv_unit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Assignment) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def widest(self) -> float:
        """The largest number of heads in a slice, counting parts as heads, over the mean of whole heads."""
        counts = [len(group) for group in self.heads]
        heads = {piece.head for group in self.heads for piece in group}
        return max(counts) * len(counts) / len(heads)


def _is_whole(heads: Heads, count: int, rows: int) -> bool:
    """Whether each row of each head is in one group."""
    taken = np.zeros((count, rows), dtype=np.int64)
    for piece in (piece for group in heads for piece in group):
        if not 0 <= piece.head < count:
            return False
        if piece.rows is not None and not _is_within(piece.rows, rows):
            return False
        taken[piece.head, slice(None) if piece.rows is None else piece.rows.array] += 1
    return bool((taken == 1).all())


def _is_within(some: Indices, size: int) -> bool:
    """Whether indices, which may come from a file, are well-formed, not empty and in [0, size)."""
    runs = some.runs
    return bool(runs) and Indices.from_runs(runs) == some and runs[0][0] >= 0 and runs[-1][1] <= size


@dataclass(frozen=True, eq=False)
class AssignmentCost:
    """An assignment, the seconds of slice u between row group a and column group b, and what moves."""

    assignment: Assignment
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
    coordinate = votes.argmax(axis=0)
    shared = replicated(layout, unit, mesh).blocks(unit).array
    for ring, (start, stop) in enumerate(split_evenly(len(shared), mesh.size("ring"))):
        coordinate[shared[start:stop]] = ring
    coordinate.setflags(write=False)  # it is remembered
    return coordinate


def replicated(layout: Layout, unit: int, mesh: Mesh) -> Indices:
    """The tokens of units that every rank holds whole; none, where one ring coordinate has everything."""
    if mesh.size("ring") == 1:
        return EMPTY
    shared = layout.shared
    spans = [(u * unit, min((u + 1) * unit, layout.size)) for u in shared.blocks(unit)]
    return Indices.from_runs([span for span in spans if shared.covers(Indices.span(*span))])


def assemble(problem: Problem, mask: BlockMask, mesh: Mesh, assignment: Assignment) -> Partition:
    """The partition of an assignment. Replicated keys are read in place, so no rank sends them."""
    check_fit(problem, mask, mesh)
    in_place = replicated(problem.kv, assignment.kv_unit, mesh)
    rows = _tokens(assignment.rows, assignment.q_unit, problem.q.size, mesh)
    cols = [
        [tokens - in_place for tokens in ring]
        for ring in _tokens(assignment.cols, assignment.kv_unit, problem.kv.size, mesh)
    ]
    work: list[tuple[WorkItem, ...]] = []
    brought: list[Indices] = []
    for rank in range(mesh.ranks):
        at = mesh.coordinate(rank)
        slice_, ring = at.get("ulysses", 0), at.get("ring", 0)
        work.append(_work(assignment.heads[slice_], rows[slice_][ring], assignment.q_unit, problem.q.size))
        brought.append(cols[slice_][ring])
    return Partition(tuple(work), tuple(brought), in_place)


def _tokens(taker: IntArray, unit: int, size: int, mesh: Mesh) -> list[list[Indices]]:
    """By Ulysses and ring coordinate, the tokens of the units that go there."""
    slices: list[list[Indices]] = []
    for slice_, row in enumerate(taker):
        if slice_ and np.array_equal(row, taker[slice_ - 1]):
            slices.append(slices[-1])
            continue
        # Runs are found where the taker changes, not by asking every token: dense masks have a million.
        edges = np.flatnonzero(np.diff(row)) + 1
        runs: list[list[tuple[int, int]]] = [[] for _ in range(mesh.size("ring"))]
        for start, stop in pairwise([0, *edges.tolist(), len(row)]):
            runs[int(row[start])].append((start * unit, min(stop * unit, size)))
        here = [Indices(tuple(run)) for run in runs]
        slices.append(here)
    return slices


def _work(group: tuple[HeadPart, ...], rows: Indices, unit: int, size: int) -> tuple[WorkItem, ...]:
    """Whole heads are one work; each part of a head is another."""
    heads_of_rows: dict[Indices, Indices] = {}
    for head in group:
        own_rows = rows
        if head.rows is not None:
            own_rows = rows & Indices(tuple((a * unit, min(b * unit, size)) for a, b in head.rows.runs))
        heads_of_rows[own_rows] = heads_of_rows.get(own_rows, EMPTY) | Indices.span(head.head, head.head + 1)
    return tuple(WorkItem(heads, own_rows) for own_rows, heads in heads_of_rows.items() if own_rows)


def check_fit(problem: Problem, mask: BlockMask, mesh: Mesh) -> None:
    """The mesh and the mask must be those of the problem."""
    if mesh.ranks != problem.ranks:
        raise InputError(
            f"The mesh {mesh} has {mesh.ranks} ranks, the tensors are on {problem.ranks}.",
            hint=f"Use axes whose product is {problem.ranks}.",
        )
    if unknown := {name for name, _ in mesh.axes} - {"ring", "ulysses"}:
        raise InputError(f"A mesh axis must be ring or ulysses, got {sorted(unknown)[0]!r}.")
    own = (mask.heads, mask.q_len, mask.kv_len)
    wanted = (problem.heads, problem.q.size, problem.kv.size)
    if own != wanted:
        raise InputError(
            "The mask is for {} heads, {} × {} tokens; ".format(*own)
            + "the tensors have {} heads, {} × {} tokens.".format(*wanted),
            hint="Make the mask for the whole sequence, text included, not for one rank's shard.",
        )


def natural(problem: Problem, mask: BlockMask, mesh: Mesh) -> Partition:
    """Heads are cut evenly over `ulysses`; rows and columns stay with the ring coordinate that holds them."""
    return assemble(problem, mask, mesh, natural_assignment(problem, mask, mesh))


def natural_assignment(problem: Problem, mask: BlockMask, mesh: Mesh) -> Assignment:
    q_unit, kv_unit = mask.units
    rows, cols = home(problem.q, q_unit, mesh), home(problem.kv, kv_unit, mesh)
    return _alike(problem, mask, mesh, rows, cols)


def zigzag_assignment(problem: Problem, mask: BlockMask, mesh: Mesh) -> Assignment:
    """Ring coordinate r takes chunks r and 2·R-1-r of the sequence: equal work under a causal mask."""
    q_unit, kv_unit = mask.units
    rows, cols = _zigzag(problem.q, q_unit, mesh), _zigzag(problem.kv, kv_unit, mesh)
    return _alike(problem, mask, mesh, rows, cols)


def _zigzag(layout: Layout, unit: int, mesh: Mesh) -> IntArray:
    ring, taker = mesh.size("ring"), home(layout, unit, mesh).copy()
    everywhere = replicated(layout, unit, mesh).blocks(unit).array
    own = np.setdiff1d(np.arange(taker.size), everywhere)
    for chunk, (start, stop) in enumerate(split_evenly(len(own), 2 * ring)):
        taker[own[start:stop]] = min(chunk, 2 * ring - 1 - chunk)
    return taker


def _alike(problem: Problem, mask: BlockMask, mesh: Mesh, rows: IntArray, cols: IntArray) -> Assignment:
    """Return an assignment with the same rows and columns for every slice of heads."""
    slices = mesh.size("ulysses")
    return Assignment(
        whole(natural_groups(problem.heads, slices)),
        np.broadcast_to(rows, (slices, rows.size)),
        np.broadcast_to(cols, (slices, cols.size)),
        *mask.units,
    )
