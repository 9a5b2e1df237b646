"""Slot: a named part of memory that the steps of a program read and write."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from weft.core.indices import Indices, IntArray
from weft.core.schedule import Piece

Positions = tuple[slice | IntArray, slice | IntArray]
"""Heads and rows of a slot."""
Shape = tuple[int, ...]


@dataclass(eq=False, repr=False, slots=True)
class Slot:
    """A named part of memory that holds a piece of a tensor, or several pieces of one message.

    memory  where it lies: `input` and `result` are the caller's tensors, `saved` outlives the call for a
            backward, `workspace` is assigned by lifetime, `window` is read in place by peers, `peer` lies in
            the window of another rank, `kernel` is what an attention kernel allocates and returns.
    parent  the slot that contains it, from byte `offset` on.
    unit    bytes of one token of one head.
    """

    name: str
    memory: str
    num_bytes: int
    dtype: str = ""
    piece: Piece | None = None
    shape: Shape = ()
    parent: Slot | None = None
    offset: int = 0
    order: IntArray | None = None
    unit: int = 0

    @property
    def root(self) -> Slot:
        return self.parent.root if self.parent is not None else self

    @property
    def start(self) -> int:
        """Bytes from the beginning of the root."""
        return self.offset + (self.parent.start if self.parent is not None else 0)

    @property
    def tokens(self) -> Indices:
        assert self.piece is not None, f"{self.name} holds no piece"
        return self.piece.tokens

    def __repr__(self) -> str:
        return f"{self.name} ({self.memory}, {self.num_bytes} bytes)"

    def positions(self, piece: Piece) -> Positions:
        """Return which heads and rows of the slot hold a piece; rows are in token order, or in `order`."""
        own = self.piece
        assert own is not None, f"{self.name} holds no piece"
        return _positions(own.heads, None, piece.heads), _positions(own.tokens, self.order, piece.tokens)

    def in_one_stride(self, piece: Piece) -> bool:
        """Whether a piece can be read as a view of the slot."""
        if self.piece is piece and self.order is None:
            return True
        return all(isinstance(at, slice) for at in self.positions(piece))


def _positions(own: Indices, order: IntArray | None, wanted: Indices) -> slice | IntArray:
    if order is None:
        if own.runs == wanted.runs:
            return slice(0, own.size)
        if len(wanted.runs) == len(own.runs) == 1:
            return slice(wanted.runs[0][0] - own.runs[0][0], wanted.runs[0][1] - own.runs[0][0])
        at = np.searchsorted(own.array, wanted.array)
    else:
        rows = np.argsort(order, kind="stable")
        at = rows[np.searchsorted(order[rows], wanted.array)]
    if not at.size:
        return slice(0, 0)
    first = int(at[0])
    return slice(first, first + at.size) if (np.diff(at) == 1).all() else at
