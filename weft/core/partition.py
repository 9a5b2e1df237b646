"""Partition: which rank computes which tiles, and which keys and values it contributes."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.codec import Value
from weft.core.indices import EMPTY, Indices


@dataclass(frozen=True)
class WorkItem(Value):
    """Some query heads of some query tokens, against all keys that the mask makes active."""

    heads: Indices
    rows: Indices


@dataclass(frozen=True)
class Partition(Value):
    """The work of each rank, and the key/value tokens that it contributes to its ring.

    Rows and columns are whole blocks of the mask (any tokens where the mask is dense): a home shard
    may cut a block, a computation never does.
    """

    work: tuple[tuple[WorkItem, ...], ...]
    cols: tuple[Indices, ...]
    shared: Indices = EMPTY
    """Key/value tokens that each rank reads from its own copy, such as a replicated text prefix."""

    def heads_of(self, rank: int) -> Indices:
        return Indices.from_runs([run for work in self.work[rank] for run in work.heads.runs])
