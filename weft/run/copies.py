"""Copies between slots: rectangles of heads and rows, with as few kernel launches as they can be.

A slot is a tuple of tensors that are indexed alike: one for q, two for kv. A Copy of a program becomes a list
of functions here, one for each launch: parts of a tensor that lie side by side, and in a buffer at equal
distances, are one strided copy.
"""

# torch has no public name for the identity of a storage, and its own types are incomplete.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.core.indices import Indices, IntArray, runs_in
from weft.core.schedule import Piece
from weft.program.slots import Positions, Slot
from weft.program.steps import CopySegment

Planes = tuple[Tensor, ...]
Slots = dict[Slot, Planes]
Launch = Callable[[Slots], None]
Views = Callable[[Slots], list[Tensor]]
Index = tuple[slice | Tensor, slice | Tensor]
"""Which heads and which rows, with index tensors on the device."""


MAX_SLICES = 8
"""Slices that one part is copied in; in more, its rows are gathered by index."""


class Axes(NamedTuple):
    """The dims of a slot's tensors that heads and rows are."""

    heads: int | None
    rows: int


ATTENTION = Axes(1, 2)


def on_device(positions: Positions, device: torch.device) -> Index:
    heads, rows = (
        torch.from_numpy(np.ascontiguousarray(at)).to(device) if isinstance(at, np.ndarray) else at
        for at in positions
    )
    return heads, rows


def is_slice(index: Index) -> bool:
    return isinstance(index[0], slice) and isinstance(index[1], slice)


def pick(x: Tensor, index: Index, axes: Axes = ATTENTION) -> Tensor:
    """A view where the index is two slices, a copy otherwise."""
    # One dim at a time: whole rows are copied at four times the speed of a joint index.
    for dim, at in zip(axes, index, strict=True):
        if dim is None:
            continue
        if isinstance(at, Tensor):
            x = x.index_select(dim, at)
        elif at.stop - at.start != x.shape[dim]:
            x = x.narrow(dim, at.start, at.stop - at.start)
    return x


def put(x: Tensor, index: Index, value: Tensor, axes: Axes = ATTENTION, *, add: bool) -> None:
    """Write or add into part of a slot; indices never repeat, so adding is safe."""
    heads, rows = index
    if is_slice(index):
        view = pick(x, index, axes)
        view.add_(value) if add else view.copy_(value)
    elif isinstance(heads, Tensor) and isinstance(rows, Tensor):
        value = value.to(x.dtype)
        x[:, heads[:, None], rows] = x[:, heads[:, None], rows] + value if add else value
    elif isinstance(heads, Tensor):
        view = pick(x, (slice(0, x.shape[axes.heads or 0]), rows), axes)
        (view.index_add_ if add else view.index_copy_)(axes.heads or 0, heads, value.to(x.dtype))
    elif isinstance(rows, Tensor):
        view = pick(x, (heads, slice(0, x.shape[axes.rows])), axes)
        (view.index_add_ if add else view.index_copy_)(axes.rows, rows, value.to(x.dtype))


class _Part(NamedTuple):
    """A segment that is two slices of a tensor at one end, and a slot of a buffer at the other."""

    segment: CopySegment
    heads: slice
    rows: slice
    offset: int
    """Bytes from the beginning of the buffer."""


class SegmentMove:
    """A segment, and where it lies in its two slots; found without memory, on any thread."""

    def __init__(self, segment: CopySegment) -> None:
        self.segment = segment
        source, target, piece = segment
        self.ends: tuple[Positions, Positions] = source.positions(piece), target.positions(piece)

    @cached_property
    def parts(self) -> list[SegmentMove]:
        """A few that are slices at both ends, which need no tensor in between; or itself."""
        source, target, piece = self.segment
        if all(isinstance(at, slice) for end in self.ends for at in end):
            return [self]
        heads, tokens = (
            _stretches(indices, [end[which] for end in self.ends])
            for which, indices in enumerate((piece.heads, piece.tokens))
        )
        if len(heads) * len(tokens) > MAX_SLICES:
            return [self]
        return [
            SegmentMove(CopySegment(source, target, Piece(piece.tensor, h, t))) for h in heads for t in tokens
        ]


class SegmentMoves(dict[int, SegmentMove]):
    """Those of a program's segments, by their ids, until it is bound."""

    def of(self, segment: CopySegment) -> SegmentMove:
        return self.get(id(segment)) or self.setdefault(id(segment), SegmentMove(segment))


class Copier:
    """Turns the segments of a Copy into launches."""

    def __init__(self, axes: Axes, device: torch.device, fixed: Slots, moves: SegmentMoves) -> None:
        """`fixed` are slots whose memory is the same in every run."""
        self.axes, self.device, self.fixed, self.moves = axes, device, fixed, moves

    def launches(self, segments: Sequence[CopySegment], *, add: bool) -> list[Launch]:
        if add:
            return [self._single(self.moves.of(segment), add=True) for segment in segments]
        launches: list[Launch] = []
        left = list(segments)
        for tensor, buffer in ((0, 1), (1, 0)):
            for run in self._equal_steps(left, tensor, buffer):
                launches.append(self._strided(run, tensor, buffer))
                taken = {id(move.segment) for move in run}
                left = [segment for segment in left if id(segment) not in taken]
        moves = [move for segment in left for move in self.moves.of(segment).parts]
        return launches + [self._single(move, add=False) for move in moves]

    def cast(self, source: Slot, target: Slot) -> Launch:
        """Convert a whole slot to the dtype of another."""
        return self._copies(
            (source, lambda slots: list(slots[source])), (target, lambda slots: list(slots[target]))
        )

    def _single(self, move: SegmentMove, *, add: bool) -> Launch:
        source, target, _ = move.segment
        at, to = (on_device(end, self.device) for end in move.ends)
        axes = self.axes
        if add or not is_slice(at) or not is_slice(to):

            def copy_part(slots: Slots) -> None:
                for x, into in zip(slots[source], slots[target], strict=True):
                    _move(x, at, into, to, axes, add=add)

            return copy_part
        return self._copies(
            (source, lambda slots: [pick(x, at, axes) for x in slots[source]]),
            (target, lambda slots: [pick(x, to, axes) for x in slots[target]]),
        )

    def _copies(self, source: tuple[Slot, Views], target: tuple[Slot, Views]) -> Launch:
        """Copy views to views, which are made once where their memory is fixed."""
        (_, read), (_, write) = source, target
        sources, targets = (
            make(self.fixed) if slot in self.fixed else None for slot, make in (source, target)
        )
        if sources is not None and targets is not None:
            sources, targets = _joined(sources, targets)

        def copy(slots: Slots) -> None:
            for x, into in zip(sources or read(slots), targets or write(slots), strict=True):
                into.copy_(x)

        return copy

    def _equal_steps(self, segments: list[CopySegment], tensor: int, buffer: int) -> list[list[_Part]]:
        """Runs of segments that are side by side in one tensor and at equal distances in one buffer."""
        groups: dict[tuple[Slot, Slot, tuple[int, ...]], list[_Part]] = {}
        for segment in segments:
            ends = segment.source, segment.target
            whole, buffered = ends[tensor], ends[buffer]
            heads, rows = self.moves.of(segment).ends[tensor]
            exact = buffered.piece is not None and buffered.piece.is_like(segment.piece)
            if exact and buffered in self.fixed and isinstance(heads, slice) and isinstance(rows, slice):
                key = whole, buffered.root, buffered.shape
                groups.setdefault(key, []).append(_Part(segment, heads, rows, buffered.start))
        runs: list[list[_Part]] = []
        for group in groups.values():
            run: list[_Part] = []
            for buffered in sorted(group, key=lambda buffered: (buffered.heads.start, buffered.rows.start)):
                if not run or not _continues(run, buffered):
                    run = []
                    runs.append(run)
                run.append(buffered)
        return [run for run in runs if len(run) > 1]

    def _strided(self, run: list[_Part], tensor: int, buffer: int) -> Launch:
        """One copy between a region of a tensor, cut into equal parts, and slots at equal distances."""
        first, last = run[0], run[-1]
        slots = first.segment.source, first.segment.target
        whole, buffered = slots[tensor], slots[buffer]
        dim = self.axes[0 if first.heads != last.heads else 1]
        assert dim is not None
        region = slice(first.heads.start, last.heads.stop), slice(first.rows.start, last.rows.stop)
        item = buffered.num_bytes // prod(buffered.shape)
        step, count, axes = (run[1].offset - first.offset) // item, len(run), self.axes

        def cut(slots: Slots) -> list[Tensor]:
            return [pick(x, region, axes).unflatten(dim, (count, -1)) for x in slots[whole]]

        def spread(slots: Slots) -> list[Tensor]:
            views = [(x, (count, *x.shape), (step, *x.stride())) for x in slots[buffered]]
            return [x.as_strided(sizes, strides).movedim(0, dim) for x, sizes, strides in views]

        ends = (whole, cut), (buffered, spread)
        return self._copies(ends[tensor], ends[buffer])


def _continues(run: list[_Part], following: _Part) -> bool:
    """Whether a part goes on where a run ends, in the tensor and in the buffer."""
    last = run[-1]
    by_heads = last.rows == following.rows and last.heads.stop == following.heads.start
    by_rows = last.heads == following.heads and last.rows.stop == following.rows.start
    if not (by_heads or by_rows) or following.offset <= last.offset:
        return False
    if len(run) == 1:
        return True
    same = following.offset - last.offset == last.offset - run[-2].offset
    return same and by_heads == (run[-2].rows == last.rows and run[-2].heads != last.heads)


def _joined(sources: list[Tensor], targets: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Planes that lie at equal distances at both ends, as one tensor each."""
    if len(sources) != 2:
        return sources, targets
    joined: list[Tensor] = []
    for first, second in (sources, targets):
        step = second.storage_offset() - first.storage_offset()
        together = first.untyped_storage()._cdata == second.untyped_storage()._cdata
        if step <= 0 or not together or first.stride() != second.stride():
            return sources, targets
        joined.append(first.as_strided((2, *first.shape), (step, *first.stride())))
    return [joined[0]], [joined[1]]


def _move(x: Tensor, at: Index, into: Tensor, to: Index, axes: Axes, *, add: bool) -> None:
    """Copy or add part of one slot to part of another, without a tensor between where it can be."""
    by_tensor = [dim for dim, which in zip(axes, at, strict=True) if isinstance(which, Tensor)]
    if add or len(by_tensor) != 1 or not is_slice(to) or x.dtype != into.dtype:
        put(into, to, pick(x, at, axes), axes, add=add)
        return
    (dim,) = by_tensor
    assert dim is not None
    heads, rows = at
    which = heads if dim == axes.heads else rows
    assert isinstance(which, Tensor)
    full = slice(0, x.shape[dim])
    rest = pick(x, (full, rows) if dim == axes.heads else (heads, full), axes)
    torch.index_select(rest, dim, which, out=pick(into, to, axes))


def in_turn(copies: list[Launch]) -> Launch:
    def copy_all(slots: Slots) -> None:
        for copy in copies:
            copy(slots)

    return copy_all


def _stretches(indices: Indices, ends: list[slice | IntArray]) -> list[Indices]:
    """Cut indices where their positions at any end are not one after another."""
    broken = np.zeros(max(0, indices.size - 1), dtype=bool)
    for at in ends:
        if isinstance(at, np.ndarray):
            broken |= np.diff(at) != 1
    return [Indices(runs_in(stretch)) for stretch in np.split(indices.array, np.flatnonzero(broken) + 1)]
