"""Heads cut by rows: where one dense head has more than a rank's share, several ranks compute its rows."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from weft.core.codec import Value
from weft.core.indices import Indices, IntArray
from weft.plan.heads import Groups, checked_loads, group_loads, refined

Piece = tuple[int, int, int]
"""A head, and the run of its q blocks."""


@dataclass(frozen=True)
class HeadPart(Value):
    """A head of a group, and the q blocks of it; None for all."""

    head: int
    rows: Indices | None = None


Heads = tuple[tuple[HeadPart, ...], ...]
"""The heads of each Ulysses coordinate, whole or in part."""


def whole(groups: Groups) -> Heads:
    """Groups of uncut heads."""
    return tuple(tuple(HeadPart(head) for head in group) for group in groups)


def split(loads: npt.ArrayLike, groups: int, *, enough: float = 1.03) -> Heads:
    """Assign loads [heads, q blocks] to groups, with as few cuts as reach `enough` times the mean.

    A cut costs a head's keys and values on one more rank. So whole heads are assigned first. While a group
    exceeds the limit, the excess is cut off its largest piece, as one run of rows, and all pieces are
    assigned again. Pieces of one head in one group are merged.

    >>> split([[4, 4, 4, 4], [1, 2, 1, 4]], 2)
    ((HeadPart(head=0, rows=Indices(0-2)),), (HeadPart(head=0, rows=Indices(3)), HeadPart(head=1, rows=None)))
    """
    table = checked_loads(loads, "head", "q block")
    sums = np.zeros((table.shape[0], table.shape[1] + 1), dtype=np.int64)
    np.cumsum(table, axis=1, out=sums[:, 1:])
    pieces: list[Piece] = [(head, 0, table.shape[1]) for head in range(table.shape[0])]
    best: tuple[int, list[Piece], Groups] | None = None
    most = len(pieces) + 2 * groups  # filling one group after the other would take fewer cuts than groups
    while True:
        sizes = _sizes(pieces, sums)
        grouping = refined(sizes, groups)
        busy = group_loads(grouping, sizes)
        top, share = int(busy.max()), -(-int(sizes.sum()) // groups)
        if best is None or top < best[0]:
            best = top, pieces, grouping
        if top <= enough * share or len(pieces) > most:
            break
        cut = _cut([pieces[i] for i in grouping[int(busy.argmax())]], top - share, sums)
        if cut is None:
            break
        (head, start, stop), at = cut
        pieces = sorted({*pieces, (head, start, at), (head, at, stop)} - {(head, start, stop)})
    _, pieces, grouping = best
    return tuple(_parts([pieces[i] for i in group], table.shape[1]) for group in grouping)


def part_loads(heads: Heads, loads: npt.ArrayLike) -> IntArray:
    table = np.asarray(loads, dtype=np.int64)
    totals: list[int] = table.sum(axis=1).tolist()
    return np.array(
        [
            sum(totals[s.head] if s.rows is None else int(table[s.head, s.rows.array].sum()) for s in group)
            for group in heads
        ],
        dtype=np.int64,
    )


def _cut(pieces: list[Piece], excess: int, sums: IntArray) -> tuple[Piece, int] | None:
    """The largest piece that has two rows with work, and where it gives `excess` away, or a little more."""
    sizes: list[int] = _sizes(pieces, sums).tolist()
    for _, piece in sorted(zip(sizes, pieces, strict=True), reverse=True):
        head, start, stop = piece
        run: list[int] = sums[head, start : stop + 1].tolist()
        # Both sides keep some work.
        first, last = bisect_right(run, run[0]), bisect_left(run, run[-1]) - 1
        if first <= last:
            at = bisect_right(run, run[-1] - excess) - 1
            return piece, start + min(max(at, first), last)
    return None


def _sizes(pieces: list[Piece], sums: IntArray) -> IntArray:
    head, start, stop = np.array(pieces, dtype=np.int64).reshape(-1, 3).T
    return sums[head, stop] - sums[head, start]


def _parts(pieces: list[Piece], rows: int) -> tuple[HeadPart, ...]:
    parts: list[HeadPart] = []
    for head, same in groupby(sorted(pieces), key=itemgetter(0)):
        taken = Indices.from_runs((start, stop) for _, start, stop in same)
        parts.append(HeadPart(head, None if taken.size == rows else taken))
    return tuple(parts)
