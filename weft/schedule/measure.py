"""Measure: what a schedule costs, from the data alone: bytes on every link, memory on every rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from weft.core.indices import IntArray
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
        return max(self.work) * self.ranks / max(1, sum(self.work))

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
    memory = tuple(_peak_memory(schedule, rank) for rank in range(schedule.problem.ranks))
    work = [0] * schedule.problem.ranks
    works = attend_works(schedule) if works is None else works
    for index, op in schedule.attends():
        work[op.rank] += works[index]
    return Report(schedule.problem.ranks, dict(link_bytes), dict(messages), memory, tuple(work))


def attend_works(schedule: Schedule) -> dict[int, int]:
    """By operation, the active (head, query token, key token) triples of each Attend."""
    mask = schedule.mask
    if mask.is_dense:
        return {i: op.q.heads.size * op.q.tokens.size * op.kv.tokens.size for i, op in schedule.attends()}
    before: dict[Piece, list[int]] = {}
    found: dict[int, int] = {}
    for index, op in schedule.attends():
        # A query piece meets many key pieces; its tiles are counted once.
        if op.q not in before:
            before[op.q] = _triples_before(mask, op.q)
        counted = before[op.q]
        found[index] = sum(counted[b] - counted[a] for a, b in op.kv.tokens.blocks(mask.block_k).runs)
    return found


def _triples_before(mask: BlockMask, q: Piece) -> list[int]:
    """For each kv block, the active triples of a query piece with all blocks before it."""
    rows = q.tokens.blocks(mask.block_q).array
    chosen, repeats = np.unique([mask.pattern_of[head] for head in q.heads], return_counts=True)
    tiles = np.unpackbits(mask.bits[np.ix_(chosen, rows)], axis=2, count=mask.kv_blocks)
    # In float64 the product is fast, and exact: a row of blocks has fewer than 2^53 triples.
    weights = np.outer(repeats, mask.row_sizes[rows]).astype(np.float64).ravel()
    queries = weights @ tiles.reshape(weights.size, -1)
    return [0, *np.cumsum(queries.astype(np.int64) * mask.col_sizes).tolist()]


def _peak_memory(schedule: Schedule, rank: int) -> int:
    """Walk a rank's program: a piece is live from the operation that brings it to the last that reads it."""
    problem = schedule.problem
    kept = schedule.kept[rank] if schedule.kept else ()
    lives = {piece: _Life(0, 0, piece.num_bytes(problem)) for piece in kept}
    passing: list[_Life] = []
    for index, op in enumerate(schedule.ops):
        if isinstance(op, Exchange):
            for piece in (t.piece for t in op.transfers if t.src == rank):
                _read(lives, piece, index)
            for piece in (t.piece for t in op.transfers if t.dst == rank):
                life = _Life(index, index, piece.num_bytes(problem))
                # Sums are added as they arrive, and equal pieces may come from several ranks.
                passing.append(life)
                if not piece.is_sum:
                    lives[piece] = passing.pop()
        elif op.rank == rank:
            _read(lives, op.q, index)
            _read(lives, op.kv, index)
            for piece in _sums(op, backward=schedule.backward):
                size = piece.elements(problem) * problem.sum_bytes
                lives.setdefault(piece, _Life(index, index, size)).last = index
    change = np.zeros(len(schedule.ops) + 1, dtype=np.int64)
    for life in (*lives.values(), *passing):
        change[life.first] += life.size
        change[life.last + 1] -= life.size
    at_home = sum(
        problem.home(tensor).rows(rank) * problem.batch * problem.head_dim * problem.item_bytes * heads
        for tensor, heads in (
            ("q", problem.heads),
            ("kv", 2 * problem.kv_heads),
            ("o", problem.heads),
        )
    )
    return int(at_home + change.cumsum().max(initial=0))


@dataclass
class _Life:
    first: int
    last: int
    size: int


def _sums(op: Attend, *, backward: bool) -> list[Piece]:
    """The pieces an Attend adds to."""
    if backward:
        return [Piece("dq", op.q.heads, op.q.tokens), Piece("dkv", op.kv.heads, op.kv.tokens)]
    return [Piece("o", op.q.heads, op.q.tokens)]


def _read(lives: dict[Piece, _Life], piece: Piece, index: int) -> None:
    if piece in lives:
        lives[piece].last = index
        return
    for held, life in lives.items():
        if held.tensor == piece.tensor and held.meets(piece):
            life.last = index
