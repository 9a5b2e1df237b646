"""Swaps of heads between the groups of many layers at once: what is left to do when plans are nearly right.

A plan is an array of slots [layers, groups, slots] of heads. Groups with fewer heads than slots hold a
head that is none, with no load, in the others; so no group ever gets more heads than the largest had.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations

import numpy as np
import numpy.typing as npt

from weft.core.indices import IntArray
from weft.plan.heads import Grouping

ROUNDS = 6  # more find little that outlasts a step
PAIRS = 8  # more slots have single swaps enough to choose from


def to_slots(plans: Sequence[Grouping], heads: int) -> IntArray:
    most = max(len(group) for plan in plans for group in plan)
    rows = [[*group, *[heads] * (most - len(group))] for plan in plans for group in plan]
    return np.array(rows, dtype=np.int64).reshape(len(plans), len(plans[0]), most)


def to_grouping(slots: IntArray, heads: int) -> Grouping:
    return tuple(tuple(sorted(head for head in group if head < heads)) for group in slots.tolist())


def slot_loads(slots: IntArray, loads: IntArray) -> IntArray:
    """[layers, groups, slots] of the loads [layers, heads]."""
    padded = np.concatenate((loads, np.zeros((len(loads), 1), dtype=np.int64)), axis=1)
    return np.take_along_axis(padded, slots.reshape(len(slots), -1), axis=1).reshape(slots.shape)


def swapped(slots: IntArray, loads: IntArray) -> IntArray:
    """Slots after a few rounds, in which heavy and light groups make the swap that brings them closest.

    The busiest group of a layer never gets busier.
    """
    _, groups, size = slots.shape
    orders, moves = _swaps(size)
    layer = np.arange(len(slots))[:, None]
    slots = slots.copy()
    for turn in range(ROUNDS):
        costs = slot_loads(slots, loads)
        sums = costs.sum(axis=2)
        rising = np.argsort(sums, axis=1, kind="stable")
        # The heaviest meets the lightest, in the next round the second lightest, so that groups mix.
        light = rising[:, turn % 2 : (groups + turn % 2) // 2]
        heavy = rising[:, ::-1][:, : light.shape[1]]
        both = np.concatenate((slots[layer, heavy], slots[layer, light]), axis=2)
        # Sums of integers below 2^53, so exact in any order; as floating point they are ten times faster.
        weighed = np.concatenate((costs[layer, heavy], costs[layer, light]), axis=2).astype(np.float64)
        apart = np.abs(weighed @ moves - (sums[layer, heavy] - sums[layer, light])[:, :, None])
        after = np.take_along_axis(both, orders[apart.argmin(axis=2)], axis=2)
        slots[layer, heavy], slots[layer, light] = after[:, :, :size], after[:, :, size:]
    return slots


@lru_cache(maxsize=64)
def _swaps(size: int) -> tuple[IntArray, npt.NDArray[np.float64]]:
    """Two groups' slots after each swap [swaps, 2 size], and twice what moves [2 size, swaps].

    The first leaves all as it is: of equally good ones, the first is taken.
    """
    orders = [list(range(2 * size))]
    for count in range(1, 3 if size <= PAIRS else 2):
        for mine in combinations(range(size), count):
            for theirs in combinations(range(size, 2 * size), count):
                order = list(range(2 * size))
                for a, b in zip(mine, theirs, strict=True):
                    order[a], order[b] = b, a
                orders.append(order)
    table = np.array(orders, dtype=np.int64).reshape(len(orders), 2 * size)
    moved = table != np.arange(2 * size)
    return table, (moved * np.where(np.arange(2 * size) < size, 2.0, -2.0)).T.copy()
