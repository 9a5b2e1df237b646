"""Swaps of rows and columns between the ranks of a ring that even out each of its steps.

The potential is Σ (load - mean of its step)² over ranks and steps. With C_i an item's loads (a row's with
each column group, or a column's with each row group) and X_a the loads of group a less their means, times
R, swapping i of group a with k of group b lowers it by at least 2/R · (d · (X_a - X_b) - R·|d|²), where
d = C_i - C_k. Groups meet as in a tournament, so that all pairs of a round, in all slices, choose at once:
in the first tournament many swaps each along X_a - X_b, and then single ones, the best of many pairs.
A group's free places hold items without load: a swap with one is a move, and the places are the cap.

Legend: U slices, R ring, B pairs; an item has R loads. Most calls are on small arrays: their number is what
takes the time.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.core.indices import IntArray

Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]

ALL_CANDIDATES = 2**62, 2**62
SAMPLED_CANDIDATES = 24, 96  # places of the two groups of a pair that are tried against each other
CANDIDATE_STRIDE = 17  # between the candidates of one turn and of the next
GROUP_SHARE = 8  # an eighth of a group may be swapped at once
MAX_SWAPS_PER_PAIR = 8  # swaps of a pair before the loads are looked at again
MAX_TURNS = 80
MAX_IDLE_TOURNAMENTS = 3  # tournaments without progress before it gives up
EXACT_BITS = 52  # bits: scores are integers that a float64 holds, so every machine chooses the same
CLOSED_SCORE = -(2.0**60)


class SwapSide:
    """The rows, or the columns, while they are dealt anew."""

    def __init__(
        self,
        tiles_Uio: IntArray,
        sums_URi: IntArray,
        now_Ui: IntArray,
        home: IntArray,
        cap: float,
        budget: float,
    ) -> None:
        self.tiles = tiles_Uio
        self.ring, self.items = int(sums_URi.shape[1]), len(home)
        # Two items without load follow: one marks a free place, one a place that must stay empty.
        self.free, self.closed = self.items, self.items + 1
        self.sums = np.zeros((*sums_URi.shape[:2], self.items + 2), dtype=np.int64)
        self.sums[..., : self.items] = sums_URi
        self.home = np.append(home, (-1, -1))
        self.away_left = int(budget * self.items) - (now_Ui != home).sum(axis=1)
        self.places = self._places(now_Ui, cap)
        self.shift = 0

    def _places(self, now_Ui: IntArray, cap: float) -> IntArray:
        """[U, R, P]: what lies in each place of each group."""
        held = np.stack([np.bincount(now, minlength=self.ring) for now in now_Ui])
        limit = np.maximum(held, max(int(cap * self.items / self.ring), -(-self.items // self.ring)))
        place = np.arange(int(limit.max()))
        places = np.full((*limit.shape, place.size), self.closed)
        places[place < limit[:, :, None]] = self.free
        for slice_, now in enumerate(now_Ui):
            places[slice_][place < held[slice_][:, None]] = np.argsort(now, kind="stable")
        return places

    def loads(self, u: IntArray, items: IntArray) -> Floats:
        """[B, R, items], cut by `shift` bits."""
        sums = self.sums[u[:, None, None], np.arange(self.ring)[:, None], items[:, None]]
        return (sums >> self.shift).astype(np.float64)

    def tiles_of(self, u: IntArray, items: IntArray) -> IntArray:
        """[swaps, items of the other side]; a free place has none."""
        loaded = items < self.items
        if loaded.all():
            return self.tiles[u, items]
        return self.tiles[u, items * loaded] * loaded[:, None]

    def groups(self, places: IntArray) -> IntArray:
        """[U, items]: the group of each item."""
        groups = np.empty((len(places), self.items + 2), dtype=np.int64)
        group = np.arange(self.ring)[:, None]
        for row, place in zip(groups, places, strict=True):
            row[place] = group
        return groups[:, : self.items]


class Pairs(NamedTuple):
    """The pairs of groups of one round, [B] each."""

    slice: IntArray
    a: IntArray
    b: IntArray


class Swaps(NamedTuple):
    """Swaps of one turn, sorted by pair: the item and its place in a, and the item and its place in b."""

    pair: IntArray
    i: IntArray
    at_i: IntArray
    k: IntArray
    at_k: IntArray


NO_SWAPS = Swaps(*np.empty((5, 0), dtype=np.int64))


def refine(
    rows: SwapSide, cols: SwapSide, tiles_URR: IntArray, goals_U: IntArray
) -> tuple[IntArray, IntArray]:
    """The best groups found of rows and of columns, [U, items] each.

    A slice whose Σ_steps max_ranks is at its goal is left alone.
    """
    tiles, slices, ring = tiles_URR, len(tiles_URR), rows.ring
    rounds = _tournament(ring, slices)
    # As flat indices: what rank a meets in step t; and the step in which a meets group b.
    rank, other = np.arange(ring)[:, None], np.arange(ring)
    met, step = rank * ring + (rank - other) % ring, (rank - other) % ring
    rows.shift = cols.shift = shift = _shift(rows, cols)
    best = np.full(slices, np.iinfo(np.int64).max)
    best_places = rows.places.copy(), cols.places.copy()
    idle = 0
    for turn in range(MAX_TURNS):
        loads: IntArray = tiles.reshape(slices, -1).take(met, axis=1)
        over: IntArray = loads.max(axis=1).sum(axis=1) - goals_U
        better = over < best
        idle = 0 if better.any() else idle + 1
        best[better] = over[better]
        if not idle:
            best_places[0][better], best_places[1][better] = rows.places[better], cols.places[better]
        if idle > MAX_IDLE_TOURNAMENTS * len(rounds) or best.max() <= 0:
            break
        pairs = rounds[turn // 2 % len(rounds)]
        if best.min() <= 0:
            pairs = Pairs(*(index[best[pairs.slice] > 0] for index in pairs))
        excess = ring * tiles - loads.sum(axis=1).take(step, axis=1)
        side, other, turned = (rows, cols, (1, 2)) if turn % 2 == 0 else (cols, rows, (2, 1))
        excess = excess.transpose(0, *turned)
        if turn < 2 * len(rounds):
            swaps = _bulk(side, _candidates(side, pairs, excess >> shift, ALL_CANDIDATES, turn))
        else:
            swaps = _fine(side, _candidates(side, pairs, excess >> shift, SAMPLED_CANDIDATES, turn))
        if swaps.pair.size:
            _apply(side, other, tiles.transpose(0, *turned), pairs, swaps)
    return rows.groups(best_places[0]), cols.groups(best_places[1])


def _shift(rows: SwapSide, cols: SwapSide) -> int:
    """By how many bits loads are cut so that every score is exact."""
    peak = max(int(side.sums.sum(axis=1).max()) for side in (rows, cols))
    bits = (8 * rows.ring * (max(rows.items, cols.items) * peak) ** 2).bit_length()
    return max(0, -(-(bits - EXACT_BITS) // 2))


@lru_cache
def _tournament(ring: int, slices: int) -> tuple[Pairs, ...]:
    """Return rounds of pairs of groups: every two groups meet once, each at most one other in a round."""
    seats = list(range(ring + ring % 2))
    rounds: list[Pairs] = []
    for _ in seats[1:]:
        met = zip(seats[: len(seats) // 2], reversed(seats), strict=False)
        pairs = np.array([pair for pair in met if max(pair) < ring], dtype=np.int64)
        a, b = np.tile(pairs, (slices, 1)).T
        rounds.append(Pairs(np.repeat(np.arange(slices), len(pairs)), a, b))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(rounds)


class PairCandidates(NamedTuple):
    """What the pairs of a round look at: `some` candidates of group a, then those of group b."""

    some: int
    place: IntArray
    items: IntArray
    loads: Floats
    """[B, R, candidates]; those of b are negative, so that loads of a swap add up."""
    apart: Floats
    """[B, R, 1]: X_a - X_b."""
    closed: Bools
    swaps: int
    """How often a pair may swap."""


def _candidates(
    side: SwapSide, pairs: Pairs, excess: IntArray, most: tuple[int, int], turn: int
) -> PairCandidates:
    u, a, b = pairs
    some, place = _tried(side.places.shape[2], most, turn // 2)
    group = np.where(np.arange(place.size) < some, a[:, None], b[:, None])
    items = side.places[u[:, None], group, place]
    loads = side.loads(u, items)
    loads[:, :, some:] *= -1
    apart = (excess[u, a] - excess[u, b])[:, :, None].astype(np.float64)
    # Closed: places that do not exist and, once the budget is spent, moves away from home.
    quota = (side.away_left // (side.ring // 2) // 2)[u]
    spent = quota < 1
    closed = items == side.closed
    if spent.any():
        closed |= (side.home[items] == group) & spent[:, None]
    return PairCandidates(
        some, place, items, loads, apart, closed, int(quota[~spent].min(initial=side.items))
    )


def _bulk(side: SwapSide, meeting: PairCandidates) -> Swaps:
    """As many swaps as help at once: a's items that are most like its excess, for those that are least."""
    some, _, _, loads, apart, closed, swaps = meeting
    along = (loads * apart).sum(axis=1)
    along[closed] = CLOSED_SCORE
    most = min(-(-some // GROUP_SHARE), swaps)
    x = np.argsort(-along[:, :some], axis=1, kind="stable")[:, :most]
    y = np.argsort(-along[:, some:], axis=1, kind="stable")[:, :most] + some
    pair = np.arange(len(x))[:, None]
    moved = (loads[pair, :, x] + loads[pair, :, y]).cumsum(axis=1)
    gain = (moved * (apart.swapaxes(1, 2) - side.ring * moved)).sum(axis=2)
    gain[closed[pair, x] | closed[pair, y]] = CLOSED_SCORE
    enough = np.where(gain.max(axis=1) > 0, gain.argmax(axis=1) + 1, 0)
    return _swaps(meeting, x, y, np.arange(most) < enough[:, None])


def _fine(side: SwapSide, meeting: PairCandidates) -> Swaps:
    """The swaps that lower the potential most, one after the other."""
    some, place, _, loads, apart, closed, swaps = meeting
    ring = side.ring
    alone = (loads * (apart - ring * loads)).sum(axis=1)
    alone[closed] = CLOSED_SCORE
    together = loads[:, :, :some].swapaxes(1, 2) @ (-2 * ring * loads[:, :, some:])
    pair = np.arange(len(loads))
    turns: list[tuple[IntArray, IntArray, Bools]] = []
    for _ in range(min(MAX_SWAPS_PER_PAIR, swaps)):
        score = together + alone[:, :some, None]
        score += alone[:, None, some:]
        score = score.reshape(len(loads), -1)
        best = score.argmax(axis=1)
        real = score[pair, best] > 0
        if not real.any():
            break
        x, y = np.divmod(best, place.size - some)
        y += some
        turns.append((x, y, real))
        moved = (loads[pair, :, x] + loads[pair, :, y]) * (2 * ring * real)[:, None]
        alone -= (moved[:, None] @ loads)[:, 0]
        alone[pair, x] = alone[pair, y] = CLOSED_SCORE
    return _swaps(meeting, *(np.array(turn).T for turn in zip(*turns, strict=True))) if turns else NO_SWAPS


def _swaps(meeting: PairCandidates, xs: IntArray, ys: IntArray, reals: Bools) -> Swaps:
    who, x, y = reals.nonzero()[0], xs[reals], ys[reals]
    place, items = meeting.place, meeting.items
    return Swaps(who, items[who, x], place[x], items[who, y], place[y])


@lru_cache(maxsize=256)
def _tried(count: int, most: tuple[int, int], turn: int) -> tuple[int, IntArray]:
    """At most so many places of both groups, spread out, and others in the next turn; how many are a's."""
    samples = [
        (turn * CANDIDATE_STRIDE + np.arange(n) * count // n) % count for n in (min(m, count) for m in most)
    ]
    return samples[0].size, np.concatenate(samples)


def _apply(side: SwapSide, other: SwapSide, tiles: IntArray, pairs: Pairs, swaps: Swaps) -> None:
    """Swap, and bring the budget, the tiles and the sums of the other side up to date."""
    u, a, b = (index[swaps.pair] for index in pairs)
    side.places[u, a, swaps.at_i] = swaps.k
    side.places[u, b, swaps.at_k] = swaps.i
    from_i, from_k = side.home[swaps.i], side.home[swaps.k]
    away = (from_i == a) * 1 - (from_i == b) + (from_k == b) - (from_k == a)
    np.subtract.at(side.away_left, u, away)
    first = np.ones(u.size, dtype=np.bool_)
    np.not_equal(swaps.pair[1:], swaps.pair[:-1], out=first[1:])
    starts = first.nonzero()[0]
    change = np.add.reduceat(side.sums[u, :, swaps.k] - side.sums[u, :, swaps.i], starts)
    load = np.add.reduceat(side.tiles_of(u, swaps.k) - side.tiles_of(u, swaps.i), starts)
    u, a, b = u[starts], a[starts], b[starts]
    tiles[u, a] += change
    tiles[u, b] -= change
    other.sums[u, a, :-2] += load
    other.sums[u, b, :-2] -= load
