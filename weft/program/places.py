"""Places: which slot has which part of a piece, and which pieces must lie in one slot."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from operator import itemgetter

from weft.core.schedule import Piece
from weft.program.slots import Slot
from weft.program.steps import Segment


def cover(wanted: Piece, places: Iterable[Slot], target: Slot) -> list[Segment]:
    """Take each part of a piece from the first slot that has it; leave out what no slot has."""
    segments: list[Segment] = []
    missing = [wanted] if wanted else []
    for slot in places:
        held = slot.piece
        assert held is not None
        rest: list[Piece] = []
        for piece in missing:
            if held.covers(piece):
                segments.append(Segment(slot, target, piece))
                continue
            heads, tokens = piece.heads & held.heads, piece.tokens & held.tokens
            if not (heads.runs and tokens.runs):
                rest.append(piece)
                continue
            segments.append(Segment(slot, target, Piece(piece.tensor, heads, tokens)))
            if heads.runs != piece.heads.runs:
                rest.append(Piece(piece.tensor, piece.heads - held.heads, piece.tokens))
            if tokens.runs != piece.tokens.runs:
                rest.append(Piece(piece.tensor, heads, piece.tokens - held.tokens))
        missing = rest
        if not missing:
            break
    return segments


class Finder:
    """Finds the pieces that have tokens of another without a look at all of them."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.runs = sorted(
            (start, stop, i) for i, piece in enumerate(pieces) for start, stop in piece.tokens.runs
        )
        self.longest = max((stop - start for start, stop, _ in self.runs), default=0)

    def meeting(self, piece: Piece) -> list[int]:
        """Return which pieces share tokens with this one, in their order."""
        found: set[int] = set()
        for start, stop in piece.tokens.runs:
            low = bisect_right(self.runs, start - self.longest, key=itemgetter(0))
            high = bisect_left(self.runs, stop, key=itemgetter(0))
            found.update([i for _, end, i in self.runs[low:high] if end > start])
        return sorted(found)


def tile(whole: Piece, parts: Sequence[Piece]) -> bool:
    """Whether parts fill a piece without overlapping."""
    size = sum(piece.heads.size * piece.tokens.size for piece in parts)
    return size == whole.heads.size * whole.tokens.size and not overlap(parts)


def overlap(parts: Sequence[Piece]) -> bool:
    """Whether any two of some pieces have a part in common."""
    return any(True for _ in _meetings(parts))


def hulls(pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces that overlap into rectangles around them, until none overlap; in order of first use."""
    distinct = list(dict.fromkeys(pieces))
    while True:
        group = list(range(len(distinct)))
        for i, j in _meetings(distinct):
            a, b = _leader(group, i), _leader(group, j)
            group[max(a, b)] = min(a, b)
        joined: dict[int, Piece] = {}
        for i, piece in enumerate(distinct):
            leader = _leader(group, i)
            had = joined.get(leader)
            joined[leader] = (
                piece
                if had is None
                else Piece(piece.tensor, had.heads | piece.heads, had.tokens | piece.tokens)
            )
        if len(joined) == len(distinct):
            return distinct
        distinct = list(joined.values())


def _leader(group: list[int], i: int) -> int:
    while group[i] != i:
        i = group[i]
    return i


def _meetings(pieces: Sequence[Piece]) -> Iterable[tuple[int, int]]:
    """Pairs of pieces that overlap, by a sweep over tokens: of disjoint ones each is looked at once."""
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
