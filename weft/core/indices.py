"""Indices: sets of integers as sorted disjoint ranges, the coordinates of pieces of tensors.

A million tokens in one run are two integers, so a schedule stays small however long the sequence is.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from weft.core.codec import Value

IntArray = npt.NDArray[np.int64]
Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Indices(Value):
    """An immutable set of non-negative integers, kept as sorted, disjoint, non-touching runs.

    >>> Indices.of(range(0, 4)) | Indices.of([7])
    Indices(0-3,7)
    """

    runs: Runs = ()

    @staticmethod
    def of(values: Iterable[int]) -> Indices:
        if isinstance(values, range) and values.step == 1:
            return Indices(((values.start, values.stop),)) if len(values) else EMPTY
        return Indices(runs_in(np.unique(np.fromiter(values, dtype=np.int64))))

    @staticmethod
    def span(start: int, stop: int) -> Indices:
        return Indices(((start, stop),)) if stop > start else EMPTY

    @staticmethod
    def from_runs(runs: Iterable[tuple[int, int]]) -> Indices:
        """Return the union of runs in any order, overlapping or not."""
        return Indices(tuple(joined(runs)))

    @cached_property
    def size(self) -> int:
        return sum(stop - start for start, stop in self.runs)

    def __len__(self) -> int:
        return self.size

    def __bool__(self) -> bool:
        return bool(self.runs)

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.runs:
            yield from range(start, stop)

    def __contains__(self, value: int) -> bool:
        return any(start <= value < stop for start, stop in self.runs)

    def __or__(self, other: Indices) -> Indices:
        if not other.runs or self.runs == other.runs:
            return self
        return Indices.from_runs(self.runs + other.runs) if self.runs else other

    def __and__(self, other: Indices) -> Indices:
        if self.runs == other.runs:
            return self
        if len(other.runs) == 1:
            return self._within(*other.runs[0])
        common: list[tuple[int, int]] = []
        a, b = self.runs, other.runs
        i = j = 0
        while i < len(a) and j < len(b):
            start, stop = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
            if start < stop:
                common.append((start, stop))
            if a[i][1] < b[j][1]:
                i += 1
            else:
                j += 1
        return Indices(tuple(common)) if common else EMPTY

    def _within(self, start: int, stop: int) -> Indices:
        """Intersect with one run, as most shards are, without a walk over the runs elsewhere."""
        first = bisect_right(self.runs, start, key=itemgetter(1))
        last = bisect_left(self.runs, stop, key=itemgetter(0))
        if first >= last:
            return EMPTY
        runs = list(self.runs[first:last])
        runs[0] = max(runs[0][0], start), runs[0][1]
        runs[-1] = runs[-1][0], min(runs[-1][1], stop)
        return Indices(tuple(runs))

    def meets(self, other: Indices) -> bool:
        """Whether any value is in both, without computing the intersection."""
        a, b = self.runs, other.runs
        if not a or not b or a[-1][1] <= b[0][0] or b[-1][1] <= a[0][0]:
            return False
        i = j = 0
        while i < len(a) and j < len(b):
            if a[i][1] <= b[j][0]:
                i += 1
            elif b[j][1] <= a[i][0]:
                j += 1
            else:
                return True
        return False

    def __sub__(self, other: Indices) -> Indices:
        left: list[tuple[int, int]] = []
        j = 0
        for start, stop in self.runs:
            while j < len(other.runs) and other.runs[j][1] <= start:
                j += 1
            k, at = j, start
            while k < len(other.runs) and other.runs[k][0] < stop:
                if other.runs[k][0] > at:
                    left.append((at, other.runs[k][0]))
                at = max(at, other.runs[k][1])
                k += 1
            if at < stop:
                left.append((at, stop))
        return Indices(tuple(left)) if left else EMPTY

    def covers(self, other: Indices) -> bool:
        a, b = self.runs, other.runs
        if len(a) == 1 and b:
            return a[0][0] <= b[0][0] and b[-1][1] <= a[0][1]
        return (self & other).size == other.size

    @cached_property
    def array(self) -> IntArray:
        """All indices in ascending order."""
        if not self.runs:
            return np.empty(0, dtype=np.int64)
        return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in self.runs])

    def blocks(self, size: int) -> Indices:
        """The blocks of `size` that these indices touch."""
        return Indices.from_runs((start // size, -(-stop // size)) for start, stop in self.runs)

    def __repr__(self) -> str:
        shown = [f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in self.runs[:6]]
        more = f",…{len(self.runs) - 6} more runs" if len(self.runs) > 6 else ""
        return f"Indices({','.join(shown)}{more})"


EMPTY = Indices()
Number = TypeVar("Number", int, float)


def joined(runs: Iterable[tuple[Number, Number]]) -> list[tuple[Number, Number]]:
    """Sort runs, leave out empty ones and join those that touch or overlap."""
    disjoint: list[tuple[Number, Number]] = []
    for start, stop in sorted(run for run in runs if run[1] > run[0]):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(disjoint[-1][1], stop))
        else:
            disjoint.append((start, stop))
    return disjoint


def runs_in(order: IntArray) -> Runs:
    """Split indices in any order into runs in which each is one more than the last."""
    if not order.size:
        return ()
    breaks = np.flatnonzero(np.diff(order) != 1)
    starts = order[np.concatenate(([0], breaks + 1))].tolist()
    stops = (order[np.concatenate((breaks, [order.size - 1]))] + 1).tolist()
    return tuple(zip(starts, stops, strict=True))


def split_evenly(size: int, parts: int) -> list[tuple[int, int]]:
    """Cut 0..size into `parts` runs whose lengths differ by at most one, longer ones first."""
    base, extra = divmod(size, parts)
    stops = [(i + 1) * base + min(i + 1, extra) for i in range(parts)]
    return list(zip([0, *stops[:-1]], stops, strict=True))
