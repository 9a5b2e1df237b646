"""Cells: the coarsest grid on which every piece of a schedule is a set of whole cells.

Tokens are cut at every boundary of a block, shard or piece, so that sets of tokens are small boolean arrays.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

import numpy as np

from weft.core.indices import Indices, IntArray
from weft.core.layout import Layout
from weft.core.schedule import Piece, Schedule


class TokenCells:
    """Token cells of the query (or of the dim that is switched) and of the key/value sequence."""

    def __init__(self, schedule: Schedule) -> None:
        problem, mask = schedule.problem, schedule.mask
        pieces = [transfer.piece for _, transfer in schedule.transfers()]
        for _, attend in schedule.attends():
            pieces += [attend.q, attend.kv]
        pieces += chain.from_iterable(schedule.kept)
        blocks = (0, 0) if mask is None else (mask.block_q, mask.block_k)
        self._edges: dict[bool, IntArray] = {}
        for is_kv, tensor, block in ((False, "q", blocks[0]), (True, "kv", blocks[1])):
            tokens = {piece.tokens for piece in pieces if piece.tensor.endswith("kv") == is_kv}
            self._edges[is_kv] = _edges(problem.home(tensor), block, tokens)
        self._memo: dict[tuple[bool, Indices], IntArray] = {}

    def blocks(self, size: int, *, is_kv: bool) -> IntArray:
        """Return the block of `size` tokens of each cell."""
        return self._edges[is_kv][:-1] // size

    def count(self, *, is_kv: bool) -> int:
        return len(self._edges[is_kv]) - 1

    def of(self, tokens: Indices, *, is_kv: bool) -> IntArray:
        """Return the cells of some tokens; the ends of every run are edges of cells."""
        key = (is_kv, tokens)
        if key not in self._memo:
            edges = self._edges[is_kv]
            runs = [(np.searchsorted(edges, a), np.searchsorted(edges, b)) for a, b in tokens.runs]
            cells = [np.arange(start, stop, dtype=np.int64) for start, stop in runs]
            self._memo[key] = np.concatenate(cells) if cells else np.empty(0, dtype=np.int64)
        return self._memo[key]

    def index(self, piece: Piece) -> tuple[IntArray, ...]:
        """Return the open-mesh index of a piece into an array [heads, cells]."""
        cells = self.of(piece.tokens, is_kv=piece.tensor.endswith("kv"))
        return np.ix_(piece.heads.array, cells)

    def first_token(self, piece: Piece, cell: int) -> int:
        """Return the first token of a piece's n-th cell."""
        is_kv = piece.tensor.endswith("kv")
        return int(self._edges[is_kv][self.of(piece.tokens, is_kv=is_kv)[cell]])


def _edges(layout: Layout, block: int, tokens: Iterable[Indices]) -> IntArray:
    edges = {0, layout.size, *(range(0, layout.size, block) if block else ())}
    for runs in (*layout.shards, *(piece.runs for piece in tokens)):
        for start, stop in runs:
            edges |= {start, stop}
    return np.asarray(sorted(edges), dtype=np.int64)
