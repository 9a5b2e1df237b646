"""Places: where on a rank a piece lies in memory, and how to copy part of one place into another.

A slot is a tuple of tensors [B, heads, rows, D] that are indexed alike: one for q, two for kv.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
import torch
from torch import Tensor

from weft.core.indices import IntArray
from weft.core.schedule import Piece

Planes = tuple[Tensor, ...]
Index = tuple[slice | Tensor, slice | Tensor]
"""Which heads and which rows of a slot."""


@dataclass(frozen=True, eq=False)
class Place:
    """A slot that holds a piece. Rows are in ascending token order unless `order` says otherwise."""

    slot: str
    piece: Piece
    order: IntArray | None = None

    @cached_property
    def _rows(self) -> tuple[IntArray, IntArray]:
        tokens = self.piece.tokens.array if self.order is None else self.order
        rows = np.argsort(tokens, kind="stable")
        return tokens[rows], rows

    def index(self, piece: Piece) -> Index:
        """Where in the slot a part of the piece lies."""
        tokens, rows = self._rows
        found = rows[np.searchsorted(tokens, piece.tokens.array)]
        heads = np.searchsorted(self.piece.heads.array, piece.heads.array)
        return _compact(heads), _compact(found)


@dataclass(frozen=True, eq=False)
class Part:
    """A part of a wanted piece and the place that has it."""

    piece: Piece
    place: Place


def cover(wanted: Piece, places: list[Place]) -> list[Part]:
    """Take each part of a piece from the first place that has it; what no place has is left out."""
    found: list[Part] = []
    missing = [wanted]
    for place in places:
        for piece in missing:
            if part := piece & place.piece:
                found.append(Part(part, place))
        missing = [rest for piece in missing for rest in piece.minus(place.piece)]
        if not missing:
            break
    return found


def hulls(pieces: list[Piece]) -> list[Piece]:
    """Join pieces that overlap into rectangles around them, until none overlap."""
    joined: list[Piece] = []
    for piece in pieces:
        at = 0
        while at < len(joined):
            if joined[at] & piece:
                other = joined.pop(at)
                piece = Piece(piece.tensor, piece.heads | other.heads, piece.tokens | other.tokens)
                at = 0
            else:
                at += 1
        joined.append(piece)
    return joined


def pick(x: Tensor, index: Index) -> Tensor:
    """A view where the index is two slices, a copy otherwise."""
    # One dim at a time: whole rows are copied at four times the speed of a joint index.
    for dim, at in enumerate(index, 1):
        x = x.index_select(dim, at) if isinstance(at, Tensor) else x.narrow(dim, at.start, at.stop - at.start)
    return x


def move(x: Tensor, at: Index, into: Tensor, to: Index, *, add: bool) -> None:
    """Copy or add part of one slot to part of another, without a tensor between where it can be."""
    by_tensor = [dim for dim, which in enumerate(at, 1) if isinstance(which, Tensor)]
    if add or len(by_tensor) != 1 or not is_slice(to) or x.dtype != into.dtype:
        put(into, to, pick(x, at), add=add)
        return
    (dim,) = by_tensor
    rest = pick(x, (slice(0, x.shape[1]), at[1]) if dim == 1 else (at[0], slice(0, x.shape[2])))
    torch.index_select(rest, dim, cast("Tensor", at[dim - 1]), out=pick(into, to))


def put(x: Tensor, index: Index, given: Tensor, *, add: bool) -> None:
    """Write or add into part of a slot; indices never repeat, so adding is safe."""
    heads, rows = index
    if is_slice(index):
        part = pick(x, index)
        part.add_(given) if add else part.copy_(given)
    elif isinstance(heads, Tensor) and isinstance(rows, Tensor):
        given = given.to(x.dtype)
        x[:, heads[:, None], rows] = x[:, heads[:, None], rows] + given if add else given
    elif isinstance(heads, Tensor):
        _put_along(1, pick(x, (slice(0, x.shape[1]), rows)), heads, given, add=add)
    elif isinstance(rows, Tensor):
        _put_along(2, pick(x, (heads, slice(0, x.shape[2]))), rows, given, add=add)


def _put_along(dim: int, view: Tensor, at: Tensor, given: Tensor, *, add: bool) -> None:
    (view.index_add_ if add else view.index_copy_)(dim, at, given.to(view.dtype))


def is_slice(index: Index) -> bool:
    return not isinstance(index[0], Tensor) and not isinstance(index[1], Tensor)


def _compact(positions: IntArray) -> slice | Tensor:
    first = int(positions[0])
    if np.array_equal(positions, np.arange(first, first + len(positions))):
        return slice(first, first + len(positions))
    return torch.from_numpy(positions.copy())
