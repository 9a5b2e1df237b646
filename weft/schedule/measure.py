"""Measure: what a schedule costs, from the data alone: bytes on every link, memory on every rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from weft.core.indices import Indices, IntArray
from weft.core.mask import BlockMask
from weft.core.schedule import Attend, Exchange, Piece, Schedule


@dataclass(frozen=True)
class Report:
    """Bytes and messages by (source, target), peak bytes and active token pairs by rank."""

    ranks: int
    link_bytes: dict[tuple[int, int], int]
    messages: dict[tuple[int, int], int]
    peak_memory: tuple[int, ...]
    """Home tensors, what has arrived and is still needed, and unfinished outputs."""
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
    return Report(schedule.problem.ranks, dict(link_bytes), dict(messages), peak_memory(schedule), work)


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


class _Lives:
    """What a rank holds besides its home tensors: a piece is live from what brings it to its last reader."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, Indices], dict[Indices, _Life]] = {}
        """By tensor and heads, then by tokens."""
        self.passing: list[_Life] = []

    def bring(self, piece: Piece, index: int, size: int) -> None:
        life = _Life(index, index, size)
        # Sums are added as they arrive, and equal pieces may come from several ranks.
        if piece.is_sum:
            self.passing.append(life)
        else:
            self.held.setdefault((piece.tensor, piece.heads), {})[piece.tokens] = life

    def read(self, piece: Piece, index: int) -> None:
        exact = self.held.get((piece.tensor, piece.heads), {}).get(piece.tokens)
        if exact:
            exact.last = index
            return
        for (tensor, heads), held in self.held.items():
            if tensor == piece.tensor and heads.meets(piece.heads):
                for tokens, life in held.items():
                    if tokens.meets(piece.tokens):
                        life.last = index

    def add_to(self, piece: Piece, index: int, size: int) -> None:
        held = self.held.setdefault((piece.tensor, piece.heads), {})
        held.setdefault(piece.tokens, _Life(index, index, size)).last = index

    def peak(self, ops: int) -> int:
        change = np.zeros(ops + 1, dtype=np.int64)
        for life in chain(self.passing, *(held.values() for held in self.held.values())):
            change[life.first] += life.size
            change[life.last + 1] -= life.size
        return int(change.cumsum().max(initial=0))


@dataclass
class _Life:
    first: int
    last: int
    size: int


def peak_memory(schedule: Schedule) -> tuple[int, ...]:
    """Peak bytes by rank: home tensors, what has arrived and is still needed, and unfinished outputs."""
    problem = schedule.problem
    ranks = [_Lives() for _ in range(problem.ranks)]
    for lives, kept in zip(ranks, schedule.kept, strict=False):
        for piece in kept:
            lives.bring(piece, 0, piece.num_bytes(problem))
    for index, op in enumerate(schedule.ops):
        if isinstance(op, Exchange):
            for transfer in op.transfers:
                ranks[transfer.src].read(transfer.piece, index)
            for transfer in op.transfers:
                ranks[transfer.dst].bring(transfer.piece, index, transfer.piece.num_bytes(problem))
        else:
            lives = ranks[op.rank]
            lives.read(op.q, index)
            lives.read(op.kv, index)
            for piece in _sums(op, backward=schedule.backward):
                lives.add_to(piece, index, piece.elements(problem) * problem.sum_bytes)
    return tuple(problem.home_bytes(rank) + lives.peak(len(schedule.ops)) for rank, lives in enumerate(ranks))


def _sums(op: Attend, *, backward: bool) -> list[Piece]:
    """The pieces an Attend adds to."""
    if backward:
        return [Piece("dq", op.q.heads, op.q.tokens), Piece("dkv", op.kv.heads, op.kv.tokens)]
    return [Piece("o", op.q.heads, op.q.tokens)]
