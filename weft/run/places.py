"""Places: where on a rank a piece lies in memory, and how to copy part of one place into another.

A slot is a tuple of tensors [B, heads, rows, D] that are indexed alike: one for q, two for kv.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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
    heads, rows = index
    if isinstance(heads, Tensor):
        return x.index_select(1, heads)[:, :, rows]
    return x[:, heads, rows]


def put(x: Tensor, index: Index, given: Tensor, *, add: bool) -> None:
    """Write or add into part of a slot; indices never repeat, so adding is safe."""
    if is_slice(index):
        part = pick(x, index)
        part.add_(given) if add else part.copy_(given)
        return
    heads, rows = (torch.arange(size)[at] for size, at in zip(x.shape[1:3], index, strict=True))
    if add:
        x[:, heads[:, None], rows] += given.to(x.dtype)
    else:
        x[:, heads[:, None], rows] = given.to(x.dtype)


def is_slice(index: Index) -> bool:
    return not isinstance(index[0], Tensor) and not isinstance(index[1], Tensor)


def _compact(positions: IntArray) -> slice | Tensor:
    first = int(positions[0])
    if np.array_equal(positions, np.arange(first, first + len(positions))):
        return slice(first, first + len(positions))
    return torch.from_numpy(positions.copy())
