"""Partition: who computes which tiles, and who brings which keys and values along."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.codec import value
from weft.core.indices import EMPTY, Indices


@value
@dataclass(frozen=True)
class Work:
    """Some query heads of some query tokens, against all keys the mask asks for."""

    heads: Indices
    rows: Indices


@value
@dataclass(frozen=True)
class Partition:
    """Per rank: its work, and the key/value tokens it contributes to its ring.

    Rows and columns are whole blocks of the mask (any tokens where the mask is dense): a home shard
    may cut a block, a computation never does.
    """

    work: tuple[tuple[Work, ...], ...]
    cols: tuple[Indices, ...]
    shared: Indices = EMPTY
    """Key/value tokens that each rank reads from its own copy, such as a replicated text prefix."""

    def heads_of(self, rank: int) -> Indices:
        found = EMPTY
        for work in self.work[rank]:
            found = found | work.heads
        return found
