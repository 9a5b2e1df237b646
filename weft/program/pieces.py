"""Pieces of a schedule: numbers for equal ones, which of them overlap, and which slots cover them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from heapq import heappop, heappush
from operator import itemgetter
from typing import TYPE_CHECKING, Generic, TypeVar

from weft.core.schedule import Piece
from weft.program.steps import CopySegment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from weft.program.slots import Shape, Slot

    SlotForm = tuple[int, str, Shape, int]
    """Bytes, dtype, shape and unit of a slot."""

T = TypeVar("T")


class Message(list[Piece]):
    """All pieces that go from one rank to another in one exchange."""

    __slots__ = ("numbers",)

    def __init__(self, pieces: Iterable[Piece], numbers: tuple[int, ...]) -> None:
        super().__init__(pieces)
        self.numbers = numbers


class Pieces:
    """Numbers of pieces: equal ones have equal numbers, on all ranks of a schedule.

    They are looked up by identity: the same piece goes around a ring, and even its hash would be slow.
    """

    def __init__(self) -> None:
        self.forms: dict[int, SlotForm] = {}
        """What all slots of a piece have in common, by its number."""
        self.disjoint: set[frozenset[int]] = set()
        """Sets of pieces, by number, of which no two overlap: those of the ranks of a ring are the same."""
        self._by_identity: dict[int, int] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._alive: list[Piece] = []

    def number(self, piece: Piece) -> int:
        number = self._by_identity.get(id(piece))
        if number is None:
            key = (piece.tensor, piece.heads.runs, piece.tokens.runs)
            number = self._by_identity[id(piece)] = self._numbers.setdefault(key, len(self._numbers))
            self._alive.append(piece)  # or its identity could become another's
        return number

    def message(self, pieces: list[Piece]) -> Message:
        return Message(pieces, tuple([self.number(piece) for piece in pieces]))


def cover(wanted: Piece, places: Iterable[Slot], target: Slot) -> list[CopySegment]:
    """Take each part of a piece from the first slot that has it; leave out what no slot has."""
    segments: list[CopySegment] = []
    missing = [wanted] if wanted else []
    for slot in places:
        held = slot.piece
        assert held is not None
        rest: list[Piece] = []
        for piece in missing:
            if held.covers(piece):
                segments.append(CopySegment(slot, target, piece))
                continue
            heads, tokens = piece.heads & held.heads, piece.tokens & held.tokens
            if not (heads.runs and tokens.runs):
                rest.append(piece)
                continue
            segments.append(CopySegment(slot, target, Piece(piece.tensor, heads, tokens)))
            if heads.runs != piece.heads.runs:
                rest.append(Piece(piece.tensor, piece.heads - held.heads, piece.tokens))
            if tokens.runs != piece.tokens.runs:
                rest.append(Piece(piece.tensor, heads, piece.tokens - held.tokens))
        missing = rest
        if not missing:
            break
    return segments


class RangeMap(Generic[T]):
    """Values by ranges of integers, such as tokens or bytes, sorted by start."""

    def __init__(self, rows: Iterable[tuple[int, int, T]] = ()) -> None:
        self._rows = sorted(rows, key=_start)
        self._longest = max((stop - start for start, stop, _ in self._rows), default=0)

    def add(self, start: int, stop: int, value: T) -> None:
        self._longest = max(self._longest, stop - start)
        insort(self._rows, (start, stop, value), key=_start)

    def overlapping(self, start: int, stop: int) -> Iterator[T]:
        first = bisect_right(self._rows, start - self._longest, key=_start)
        for begin, end, value in self._rows[first : bisect_left(self._rows, stop, key=_start)]:
            if max(begin, start) < min(end, stop):
                yield value

    def remove(self, start: int, value: T) -> None:
        at = bisect_left(self._rows, start, key=_start)
        while self._rows[at][2] is not value:
            at += 1
        del self._rows[at]


_start = itemgetter(0)


def overlap(pieces: Sequence[Piece]) -> bool:
    """Whether any two of some pieces overlap."""
    return any(True for _ in _overlaps(pieces))


def hulls(pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces that overlap into rectangles around them, until none overlap; in order of first use."""
    distinct = list(dict.fromkeys(pieces))
    while True:
        group = list(range(len(distinct)))
        for i, j in _overlaps(distinct):
            a, b = _leader(group, i), _leader(group, j)
            group[max(a, b)] = min(a, b)
        joined: dict[int, Piece] = {}
        for i, piece in enumerate(distinct):
            leader = _leader(group, i)
            if hull := joined.get(leader):
                piece = Piece(piece.tensor, hull.heads | piece.heads, hull.tokens | piece.tokens)  # noqa: PLW2901
            joined[leader] = piece
        if len(joined) == len(distinct):
            return distinct
        distinct = list(joined.values())


def _leader(group: list[int], i: int) -> int:
    while group[i] != i:
        i = group[i]
    return i


def _overlaps(pieces: Sequence[Piece]) -> Iterable[tuple[int, int]]:
    """Yield pairs of pieces that overlap, by a sweep over tokens."""
    runs = sorted((start, stop, i) for i, piece in enumerate(pieces) for start, stop in piece.tokens.runs)
    active: dict[int, int] = {}
    ends: list[tuple[int, int]] = []
    for start, stop, i in runs:
        while ends and ends[0][0] <= start:
            end, j = heappop(ends)
            if active.get(j) == end:
                del active[j]
        for j in active:
            if pieces[i].heads.meets(pieces[j].heads):
                yield j, i
        active[i] = stop
        heappush(ends, (stop, i))
