"""Pieces of a schedule: numbers for equal ones, which of them overlap, and which slots cover them."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from heapq import heappop, heappush
from operator import itemgetter
from typing import TYPE_CHECKING

from weft.core.schedule import Piece
from weft.program.steps import CopySegment

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weft.program.slots import Shape, Slot

    SlotForm = tuple[int, str, Shape, int]
    """Bytes, dtype, shape and unit of a slot."""


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


class Finder:
    """An index of pieces by their tokens."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.runs = sorted(
            (start, stop, i) for i, piece in enumerate(pieces) for start, stop in piece.tokens.runs
        )
        self.longest = max((stop - start for start, stop, _ in self.runs), default=0)

    def meeting(self, piece: Piece) -> list[int]:
        """Return which pieces share tokens with this one, in their order."""
        numbers: set[int] = set()
        for start, stop in piece.tokens.runs:
            low = bisect_right(self.runs, start - self.longest, key=itemgetter(0))
            high = bisect_left(self.runs, stop, key=itemgetter(0))
            numbers.update([i for _, end, i in self.runs[low:high] if end > start])
        return sorted(numbers)


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
