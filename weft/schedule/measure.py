"""Measure: the cost of a schedule, from the data alone: bytes on every link, work on every rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.core.indices import Indices, IntArray
from weft.core.mask import BlockMask
from weft.core.schedule import Attend, Schedule


@dataclass(frozen=True)
class ScheduleCost:
    """Bytes and messages by (source, target), and active token pairs by rank."""

    ranks: int
    link_bytes: dict[tuple[int, int], int]
    messages: dict[tuple[int, int], int]
    work: tuple[int, ...]
    """Active (head, query token, key token) triples that each rank computes."""

    def __repr__(self) -> str:
        sent, messages = self.total_bytes, sum(self.messages.values())
        return (
            f"ScheduleCost({self.ranks} ranks, {sent:,} bytes in {messages} messages, "
            f"imbalance {self.imbalance:.3f})"
        )

    def sent(self, rank: int) -> int:
        return sum(size for (src, _), size in self.link_bytes.items() if src == rank)

    @property
    def total_bytes(self) -> int:
        return sum(self.link_bytes.values())

    @property
    def imbalance(self) -> float:
        """The slowest rank's work over the mean: 1.0 is perfect."""
        return max(self.work) * self.ranks / sum(self.work) if any(self.work) else 1.0

    def matrix(self) -> IntArray:
        """Return the bytes that each rank (row) sends to each other (column)."""
        matrix = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        for (src, dst), size in self.link_bytes.items():
            matrix[src, dst] = size
        return matrix


def measure(schedule: Schedule, works: dict[int, int] | None = None) -> ScheduleCost:
    """Add up bytes, messages and work; `works` are those of `attend_works`, if they are known already."""
    problem, works = schedule.problem, attend_works(schedule) if works is None else works
    link_bytes: Counter[tuple[int, int]] = Counter()
    messages: Counter[tuple[int, int]] = Counter()
    work = [0] * problem.ranks
    for index, op in enumerate(schedule.ops):
        if isinstance(op, Attend):
            work[op.rank] += works[index]
            continue
        for transfer in op.transfers:
            link_bytes[transfer.src, transfer.dst] += transfer.piece.num_bytes(problem)
        messages.update({(transfer.src, transfer.dst) for transfer in op.transfers})
    return ScheduleCost(problem.ranks, dict(link_bytes), dict(messages), tuple(work))


def attend_works(schedule: Schedule) -> dict[int, int]:
    """Return the active (head, query token, key token) triples of each Attend, by operation."""
    if schedule.mask is None:
        return {}
    mask = schedule.mask
    if mask.is_dense:
        return {i: op.q.cells * op.kv.tokens.size for i, op in schedule.attends()}
    by_heads: dict[Indices, list[tuple[int, Attend]]] = {}
    for index, op in schedule.attends():
        by_heads.setdefault(op.q.heads, []).append((index, op))
    works: dict[int, int] = {}
    for heads, attends in by_heads.items():
        counts = mask.counts(heads)
        before: dict[Indices, list[int]] = {}
        for index, op in attends:
            # A query piece attends to many key pieces; its tiles are counted once.
            if op.q.tokens not in before:
                before[op.q.tokens] = _triples_before(mask, counts, op.q.tokens)
            counted = before[op.q.tokens]
            works[index] = sum(counted[b] - counted[a] for a, b in op.kv.tokens.blocks(mask.block_k).runs)
    return works


def _triples_before(mask: BlockMask, counts: npt.NDArray[np.integer], tokens: Indices) -> list[int]:
    """Return, for each kv block, the active triples of some queries with all earlier kv blocks."""
    rows = tokens.blocks(mask.block_q).array
    queries = counts[rows].sum(axis=0, dtype=np.int64) * mask.block_q
    if rows[-1] == mask.q_blocks - 1:
        queries -= counts[-1].astype(np.int64) * (mask.block_q - mask.row_sizes[-1])
    return [0, *np.cumsum(queries * mask.col_sizes).tolist()]
