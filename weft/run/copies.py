"""Copies between slots: rectangles of heads and rows, with as few kernel launches as they can be.

A slot is a tuple of tensors that are indexed alike: one for q, two for kv. A Copy of a program becomes a list of
functions here, one for each launch: parts that leave a tensor for buffers in equal steps are one strided copy,
parts that fill a slot side by side are one concatenation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.schedule.program import Positions, Segment, Slot

Planes = tuple[Tensor, ...]
Slots = dict[Slot, Planes]
Launch = Callable[[Slots], None]
Index = tuple[slice | Tensor, slice | Tensor]
"""Which heads and which rows, with index tensors on the device."""


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
        part = pick(x, index, axes)
        part.add_(value) if add else part.copy_(value)
    elif isinstance(heads, Tensor) and isinstance(rows, Tensor):
        value = value.to(x.dtype)
        x[:, heads[:, None], rows] = x[:, heads[:, None], rows] + value if add else value
    elif isinstance(heads, Tensor):
        view = pick(x, (slice(0, x.shape[axes.heads or 0]), rows), axes)
        (view.index_add_ if add else view.index_copy_)(axes.heads or 0, heads, value.to(x.dtype))
    elif isinstance(rows, Tensor):
        view = pick(x, (heads, slice(0, x.shape[axes.rows])), axes)
        (view.index_add_ if add else view.index_copy_)(axes.rows, rows, value.to(x.dtype))


class Copier:
    """Turns the segments of a Copy into launches."""

    def __init__(self, axes: Axes, device: torch.device, fixed: Slots) -> None:
        """`fixed` are slots whose memory is the same in every run."""
        self.axes, self.device, self.fixed = axes, device, fixed

    def launches(self, segments: Sequence[Segment], *, add: bool) -> list[Launch]:
        if add:
            return [self._single(segment, add=True) for segment in segments]
        launches: list[Launch] = []
        left = list(segments)
        while left:
            group = self._equal_steps(left)
            if len(group) > 1:
                launches += self._scatter(group)
            else:
                group = self._side_by_side(left)
                launches += self._gather(group) if len(group) > 1 else [self._single(group[0], add=False)]
            taken = set(map(id, group))
            left = [segment for segment in left if id(segment) not in taken]
        return launches

    def _single(self, segment: Segment, *, add: bool) -> Launch:
        source, target, piece = segment
        at, to = (on_device(slot.positions(piece), self.device) for slot in (source, target))
        axes = self.axes
        if add or not is_slice(at) or not is_slice(to):

            def move(slots: Slots) -> None:
                for x, into in zip(slots[source], slots[target], strict=True):
                    _move(x, at, into, to, axes, add=add)

            return move
        return self._fixed_copies(
            lambda slots: [pick(x, at, axes) for x in slots[source]],
            lambda slots: [pick(x, to, axes) for x in slots[target]],
            source in self.fixed,
            target in self.fixed,
        )

    def _fixed_copies(
        self, read: Callable[[Slots], list[Tensor]], write: Callable[[Slots], list[Tensor]], a: bool, b: bool
    ) -> Launch:
        """Copy one list of views to another, made once where their memory is fixed."""
        sources, targets = read(self.fixed) if a else None, write(self.fixed) if b else None

        def copy(slots: Slots) -> None:
            for x, into in zip(sources or read(slots), targets or write(slots), strict=True):
                into.copy_(x)

        return copy

    # Parts of one tensor that go to buffers in equal steps.

    def _equal_steps(self, segments: list[Segment]) -> list[Segment]:
        """The first segments that cut one tensor into equal parts, for slots at equal distances in one buffer."""
        first = segments[0]
        root = first.target.root
        if root not in self.fixed or first.target is root:
            return [first]
        group, step = [first], 0
        dim = -1
        for segment in segments[1:]:
            if segment.source is not first.source or segment.target.root is not root:
                continue
            last = group[-1]
            along = _follows(last, segment, by="source")
            distance = _offset(segment.target) - _offset(last.target)
            fits = along >= 0 and distance > 0 and segment.target.shape == first.target.shape
            if not fits or (step and (distance, along) != (step, dim)):
                break
            step, dim = distance, along
            group.append(segment)
        whole = all(s.target.piece is not None and _same(s.target.piece, s.piece) for s in group)
        return group if whole else [first]

    def _scatter(self, group: list[Segment]) -> list[Launch]:
        first, last = group[0], group[-1]
        source, target = first.source, first.target
        which = _follows(group[0], group[1], by="source")
        dim = self.axes[which]
        assert dim is not None
        start, end = (on_device(source.positions(s.piece), self.device) for s in (first, last))
        whole = list(start)
        whole[which] = slice(start[which].start, end[which].stop)  # type: ignore[union-attr]
        region: Index = (whole[0], whole[1])
        step = (_offset(group[1].target) - _offset(target)) // _item(target)
        planes = self._strided(target, len(group), step, dim)
        axes, count = self.axes, len(group)

        def split(slots: Slots) -> list[Tensor]:
            return [pick(x, region, axes).unflatten(dim, (count, -1)) for x in slots[source]]

        return [self._fixed_copies(split, lambda _: planes, source in self.fixed, b=True)]

    def _strided(self, target: Slot, count: int, step: int, dim: int) -> list[Tensor]:
        """[…, count, …]: the planes of slots at equal distances, as one tensor each."""
        views: list[Tensor] = []
        for plane in self.fixed[target]:
            sizes, strides = (count, *plane.shape), (step, *plane.stride())
            views.append(plane.as_strided(sizes, strides).movedim(0, dim))
        return views

    # Slots that are filled side by side.

    def _side_by_side(self, segments: list[Segment]) -> list[Segment]:
        """The first segments that fill one slot along one dim, in order and in one dtype."""
        first = segments[0]
        group, dim = [first], -1
        for segment in segments[1:]:
            if segment.target is not first.target or segment.source.dtype != first.target.dtype:
                continue
            along = _follows(group[-1], segment, by="target")
            if along < 0 or (dim >= 0 and along != dim):
                continue
            group.append(segment)
            dim = along
        return group if first.source.dtype == first.target.dtype else [first]

    def _gather(self, group: list[Segment]) -> list[Launch]:
        target = group[0].target
        which = _follows(group[0], group[1], by="target")
        dim = self.axes[which]
        assert dim is not None
        start, end = (on_device(target.positions(s.piece), self.device) for s in (group[0], group[-1]))
        whole = list(start)
        whole[which] = slice(start[which].start, end[which].stop)  # type: ignore[union-attr]
        region: Index = (whole[0], whole[1])
        parts = [(s.source, on_device(s.source.positions(s.piece), self.device)) for s in group]
        axes = self.axes

        def join(slots: Slots) -> None:
            for plane, into in enumerate(slots[target]):
                pieces = [pick(slots[source][plane], at, axes) for source, at in parts]
                torch.cat(pieces, dim, out=pick(into, region, axes))

        return [join]


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


def _follows(before: Segment, after: Segment, *, by: str) -> int:
    """0 if a segment's heads come right after another's in a slot, 1 if its rows do; -1 otherwise."""
    slot = before.source if by == "source" else before.target
    (heads, rows), (more_heads, more_rows) = slot.positions(before.piece), slot.positions(after.piece)
    if not all(isinstance(at, slice) for at in (heads, rows, more_heads, more_rows)):
        return -1
    for along, a, b, same in (
        (0, heads, more_heads, rows == more_rows),
        (1, rows, more_rows, heads == more_heads),
    ):
        assert isinstance(a, slice) and isinstance(b, slice)
        equal = by == "target" or a.stop - a.start == b.stop - b.start
        if same and a.stop == b.start and equal:
            return along
    return -1


def _same(a: object, b: object) -> bool:
    return (a.heads, a.tokens) == (b.heads, b.tokens)  # type: ignore[attr-defined]


def _offset(slot: Slot) -> int:
    """Bytes from the beginning of the buffer that a slot lies in."""
    return slot.offset + (_offset(slot.parent) if slot.parent is not None else 0)


def _item(slot: Slot) -> int:
    return slot.num_bytes // prod(slot.shape) if prod(slot.shape) else 1
