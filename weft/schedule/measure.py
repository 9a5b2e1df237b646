"""Measure: what a schedule costs, from the data alone: bytes on every link, work on every rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.core.indices import Indices, IntArray
from weft.core.mask import BlockMask
from weft.core.schedule import Attend, Schedule


@dataclass(frozen=True)
class Report:
    """Bytes and messages by (source, target), and active token pairs by rank."""

    ranks: int
    link_bytes: dict[tuple[int, int], int]
    messages: dict[tuple[int, int], int]
    work: tuple[int, ...]
    """Active (head, query token, key token) triples that each rank computes."""

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
        """Bytes from row to column."""
        found = np.zeros((self.ranks, self.ranks), dtype=np.int64)
        for (src, dst), size in self.link_bytes.items():
            found[src, dst] = size
        return found


def measure(schedule: Schedule, works: dict[int, int] | None = None) -> Report:
    """`works` are those of `attend_works`, if they are known already."""
    link_bytes: Counter[tuple[int, int]] = Counter()
    pairs: set[tuple[int, int, int]] = set()
    for index, transfer in schedule.transfers():
        link_bytes[transfer.src, transfer.dst] += transfer.piece.num_bytes(schedule.problem)
        pairs.add((index, transfer.src, transfer.dst))
    messages = Counter((src, dst) for _, src, dst in pairs)
    work = rank_work(schedule, works)
    return Report(schedule.problem.ranks, dict(link_bytes), dict(messages), work)


def rank_work(schedule: Schedule, works: dict[int, int] | None = None) -> tuple[int, ...]:
    """Active (head, query token, key token) triples that each rank computes."""
    found = [0] * schedule.problem.ranks
    works = attend_works(schedule) if works is None else works
    for index, op in schedule.attends():
        found[op.rank] += works[index]
    return tuple(found)


def attend_works(schedule: Schedule) -> dict[int, int]:
    """By operation, the active (head, query token, key token) triples of each Attend."""
    if schedule.mask is None:
        return {}
    mask = schedule.mask
    if mask.is_dense:
        return {i: op.q.heads.size * op.q.tokens.size * op.kv.tokens.size for i, op in schedule.attends()}
    by_heads: dict[Indices, list[tuple[int, Attend]]] = {}
    for index, op in schedule.attends():
        by_heads.setdefault(op.q.heads, []).append((index, op))
    found: dict[int, int] = {}
    for heads, attends in by_heads.items():
        counts = mask.counts(heads)
        before: dict[Indices, list[int]] = {}
        for index, op in attends:
            # A query piece meets many key pieces; its tiles are counted once.
            if op.q.tokens not in before:
                before[op.q.tokens] = _triples_before(mask, counts, op.q.tokens)
            counted = before[op.q.tokens]
            found[index] = sum(counted[b] - counted[a] for a, b in op.kv.tokens.blocks(mask.block_k).runs)
    return found


def _triples_before(mask: BlockMask, counts: npt.NDArray[np.integer], tokens: Indices) -> list[int]:
    """For each kv block, the active triples of some queries with all blocks before it."""
    rows = tokens.blocks(mask.block_q).array
    queries = counts[rows].sum(axis=0, dtype=np.int64) * mask.block_q
    if rows[-1] == mask.q_blocks - 1:
        queries -= counts[-1].astype(np.int64) * (mask.block_q - mask.row_sizes[-1])
    return [0, *np.cumsum(queries * mask.col_sizes).tolist()]
