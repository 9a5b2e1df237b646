"""Heads to Ulysses groups: db-SP's greedy deal, and a refinement that closes most of the gap.

Loads are integers and ties go by index, so that all ranks find the same grouping.
"""

from __future__ import annotations

import heapq
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.indices import IntArray, split_evenly

Groups = tuple[tuple[int, ...], ...]
"""The heads of each Ulysses coordinate."""

MEAN_TOLERANCE = 1024  # closer than a thousandth to the mean is balanced
MAX_PAIRED_HEADS = 16  # larger groups have enough single heads to choose from


def natural(heads: int, groups: int) -> Groups:
    """Heads in their order, counts differing by at most one."""
    return tuple(tuple(range(start, stop)) for start, stop in split_evenly(heads, groups))


def greedy(loads: npt.ArrayLike, groups: int) -> Groups:
    """Heaviest first to the least loaded with a free slot; the first to fill theirs may hold one more.

    Where heads divide, it is db-SP's as published.
    """
    weights = _checked(loads, groups)
    count, extra = divmod(weights.size, groups)
    costs: list[int] = weights.tolist()
    heap = [(0, group) for group in range(groups)]
    dealt: list[list[int]] = [[] for _ in range(groups)]
    heaviest: list[int] = np.argsort(-weights, kind="stable").tolist()
    for head in heaviest:
        load, group = heapq.heappop(heap)
        while len(dealt[group]) == count and not extra:
            load, group = heapq.heappop(heap)
        extra -= len(dealt[group]) == count
        dealt[group].append(head)
        if len(dealt[group]) <= count:
            heapq.heappush(heap, (load + costs[head], group))
    return _frozen(dealt)


def refined(loads: npt.ArrayLike, groups: int) -> Groups:
    """The greedy deal, improved by swaps between pairs of groups; any number of heads on any of groups.

    >>> refined([4, 3, 3, 2, 2, 2], 2)
    ((0, 3, 4), (1, 2, 5))
    """
    return improve(greedy(loads, groups), loads)


def improve(grouping: Groups, loads: npt.ArrayLike) -> Groups:
    """Swap heads with the heaviest group until none makes it lighter; a balanced grouping stays as it is.

    One swap gives up to two heads for up to two of another group, the lightest asked first.
    It ends when no group has more than 1/NEAR above the mean.
    """
    search = _Search(grouping, np.asarray(loads, dtype=np.int64))
    while search.step():
        pass
    return _frozen(search.groups)


def group_loads(grouping: Groups, loads: npt.ArrayLike) -> IntArray:
    # A group is a handful of heads: plain integers add up faster than an array is made.
    costs: list[int] = np.asarray(loads, dtype=np.int64).tolist()
    return np.array([sum([costs[head] for head in group]) for group in grouping], dtype=np.int64)


class _Search:
    """Groups whose heads are swapped, with the loads of all subsets that each could give."""

    def __init__(self, grouping: Groups, weights: IntArray) -> None:
        self.groups = [list(group) for group in grouping]
        self.sums: list[int] = group_loads(grouping, weights).tolist()
        self.enough = sum(self.sums) * (MEAN_TOLERANCE + 1) // (MEAN_TOLERANCE * len(grouping))
        # Twice each load, to compare it with a gap of which half should move.
        self.doubled = 2 * weights
        self.offers: dict[int, IntArray] = {}

    def step(self) -> bool:
        """Whether the heaviest group could be made lighter; the lightest partner is asked first."""
        *others, top = sorted(range(len(self.groups)), key=self.sums.__getitem__)
        return self.sums[top] > self.enough and any(self.swap(top, other) for other in others)

    def swap(self, heavy: int, light: int) -> bool:
        """Make the one swap that brings two groups closest together, if there is any."""
        heavy_heads, light_heads = self.groups[heavy], self.groups[light]
        gap = self.sums[heavy] - self.sums[light]
        offered, returned = self.offer(heavy), self.offer(light)
        apart = offered[:, None] - (returned + gap)
        np.abs(apart, out=apart)
        best = int(apart.argmin())
        if apart.item(best) >= gap:
            return False
        give_index, take_index = divmod(best, returned.size)
        keep, give = _parted(heavy_heads, give_index)
        leave, take = _parted(light_heads, take_index)
        self.groups[heavy], self.groups[light] = keep + take, leave + give
        moved = int(offered[give_index] - returned[take_index]) // 2
        self.sums[heavy] -= moved
        self.sums[light] += moved
        del self.offers[heavy], self.offers[light]
        return True

    def offer(self, place: int) -> IntArray:
        """Twice the load of every pick of a group; computed at first use, as most are never used."""
        if place not in self.offers:
            group = self.groups[place]
            self.offers[place] = _subsets(len(group)) @ self.doubled[group]
        return self.offers[place]


def _parted(group: list[int], subset: int) -> tuple[list[int], list[int]]:
    chosen = _picks(len(group))[subset]
    return [head for i, head in enumerate(group) if i not in chosen], [group[i] for i in chosen]


@lru_cache(maxsize=256)
def _picks(size: int) -> tuple[tuple[int, ...], ...]:
    """Places in a group: none, each one, and each two where that is not too many."""
    most = min(size, 2 if size <= MAX_PAIRED_HEADS else 1)
    return tuple(pick for count in range(most + 1) for pick in combinations(range(size), count))


@lru_cache(maxsize=256)
def _subsets(size: int) -> IntArray:
    """[picks, size] of 0 and 1."""
    members = np.zeros((len(_picks(size)), size), dtype=np.int64)
    for row, pick in zip(members, _picks(size), strict=True):
        row[list(pick)] = 1
    return members


def _frozen(groups: list[list[int]]) -> Groups:
    return tuple(tuple(sorted(group)) for group in groups)


def checked_loads(loads: npt.ArrayLike, *axes: str) -> IntArray:
    """Return the loads; raise unless they are non-negative integers with these axes."""
    array = np.asarray(loads)
    if array.ndim != len(axes) or (array.size and (array.dtype.kind not in "iu" or int(array.min()) < 0)):
        raise InputError(
            f"Loads are one non-negative integer per {' and '.join(axes)}; got {array.dtype} of shape "
            f"{array.shape}.",
            hint="Use counts of tiles, or costs as integers.",
        )
    return array.astype(np.int64)


def _checked(loads: npt.ArrayLike, groups: int) -> IntArray:
    if groups < 1:
        raise InputError(f"groups must be >= 1, got {groups}.", hint="Use the Ulysses size.")
    return checked_loads(loads, "head")
