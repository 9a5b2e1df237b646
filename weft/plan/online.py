"""Plans through a denoising loop: what one step has seen plans the next, where the old plan drifted."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.indices import IntArray
from weft.core.mask import BlockMask
from weft.plan.balance import step_ratio
from weft.plan.blocks import Placement, joint, tile_sums
from weft.plan.counts import head_loads, tile_loads
from weft.plan.heads import Grouping
from weft.plan.swaps import slot_loads, swapped, to_grouping, to_slots

Plans = tuple[Grouping, ...]
"""One grouping per layer."""


class Hybrid(NamedTuple):
    """The plan of a layer at both levels: its heads to slices, and the blocks of each to its ring."""

    grouping: Grouping
    blocks: Placement


class Policy(Protocol):
    """What runs a loop: the plans in force by layer, and what each step has seen.

    Groupings are planned from counts [layers, heads], hybrids from the masks of all layers.
    """

    plans: tuple[Any, ...]

    def observe(self, seen: Any, /) -> tuple[Any, ...]: ...


class Online:
    """Re-plans a layer from a forecast of its counts, when its plan's ratio on them is past `threshold`.

    Heads of plans are swapped, not dealt anew, all that drifted at once; they have one number of groups.
    No group gets more heads than the largest had to start with. Start from equal counts: that costs
    balance where loads are known, and saves some where they are a forecast, since what all heads gain or
    lose alike then cancels.
    """

    def __init__(self, plans: Sequence[Grouping], *, threshold: float = 1.015) -> None:
        self.plans: Plans = _all_heads(tuple(plans))
        self.threshold = threshold
        self.replanned = 0
        self._shape = _shape(self.plans)
        self._slots = to_slots(self.plans, self._shape[1])
        self._history: deque[IntArray] = deque(maxlen=3)

    def observe(self, counts: npt.ArrayLike) -> Plans:
        self._history.append(_checked(counts, self._shape))
        expected = forecast(self._history)
        drifted = np.flatnonzero(_ratios(slot_loads(self._slots, expected).sum(axis=2)) > self.threshold)
        if drifted.size:
            self._slots[drifted] = swapped(self._slots[drifted], expected[drifted])
            plans = list(self.plans)
            for layer in drifted.tolist():
                plans[layer] = to_grouping(self._slots[layer], self._shape[1])
            self.replanned += sum(new != old for new, old in zip(plans, self.plans, strict=True))
            self.plans = tuple(plans)
        return self.plans


class OnlineBlocks:
    """Re-plans a layer's blocks from its last mask, when the plan's step ratio on it is past `threshold`.

    It begins with where the blocks are, so few move; at most the budget of `LIMITS` is ever away from
    `homes`. Heads are swapped before, as `Online` does, so that slices stay even.
    """

    def __init__(
        self,
        plans: Sequence[Hybrid],
        *,
        homes: tuple[IntArray, IntArray] | None = None,
        threshold: float = 1.02,
    ) -> None:
        self.plans, self.threshold = tuple(plans), threshold
        self.replanned = 0
        self._homes = (None, None) if homes is None else homes
        self._heads = Online([plan.grouping for plan in self.plans])

    def observe(self, masks: Sequence[BlockMask]) -> tuple[Hybrid, ...]:
        heads = self._heads.observe(np.array([head_loads(mask) for mask in masks]))
        old = [plan.blocks for plan in self.plans]
        self.plans = tuple(self._layer(*each) for each in zip(old, heads, masks, strict=True))
        self.replanned += sum(plan.blocks is not was for plan, was in zip(self.plans, old, strict=True))
        return self.plans

    def _layer(self, blocks: Placement, grouping: Grouping, mask: BlockMask) -> Hybrid:
        wanted = [(len(grouping), size) for size in (mask.q_blocks, mask.kv_blocks)]
        if [blocks.rows.shape, blocks.cols.shape] != wanted:
            raise InputError(
                f"Blocks of shapes {blocks.rows.shape} and {blocks.cols.shape} for {mask} in {len(grouping)} "
                "slices.",
                hint=f"Expected {wanted[0]} and {wanted[1]}; a mask on another grid needs plans of its own.",
            )
        tiles, now = tile_loads(mask, grouping), blocks.dealt
        if step_ratio(tile_sums(tiles, *now, blocks.ring)) <= self.threshold:
            return Hybrid(grouping, blocks)
        found = joint(tiles, blocks.ring, *self._homes, start=now)
        placed = Placement(blocks.ring, *found)
        return Hybrid(grouping, blocks if placed == blocks else placed)


def forecast(history: Sequence[IntArray]) -> IntArray:
    """The next counts: the last, and as much of their last change as the change before it foretold of that.

    The share is the least-squares one over all layers and heads, in 256ths, between nothing and all.
    """
    last = history[-1]
    if len(history) < 3:
        return last
    change, before = last - history[-2], history[-2] - history[-3]
    # Integers, so that all ranks forecast the same; small enough that their squares add up.
    spare = max(0, int(np.abs((change, before)).max(initial=0)).bit_length() - 20)
    small, earlier = change >> spare, before >> spare
    along, size = int((small * earlier).sum()), int((earlier * earlier).sum())
    share = min(256, max(0, 256 * along // size)) if size else 0
    return np.maximum(0, last + (share * change >> 8))


def ratios(plans: Plans, counts: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """[layers]: max / mean over the groups of each plan."""
    table = _checked(counts, _shape(plans))
    return _ratios(slot_loads(to_slots(plans, table.shape[1]), table).sum(axis=2))


def _ratios(loads: IntArray) -> npt.NDArray[np.float64]:
    total = loads.sum(axis=1)
    return np.where(total > 0, loads.max(axis=1) * loads.shape[1] / np.maximum(total, 1), 1.0)


def _shape(plans: Plans) -> tuple[int, int]:
    """Layers and heads."""
    shapes = {(len(plan), sum(len(group) for group in plan)) for plan in plans}
    if len(shapes) != 1:
        raise InputError(
            f"Plans with {len(shapes)} different numbers of groups or heads.",
            hint="Give at least one layer; keep a policy for each number of groups.",
        )
    return len(plans), shapes.pop()[1]


def _all_heads(plans: Plans) -> Plans:
    """The plans, if each holds every head exactly once."""
    _, heads = _shape(plans)
    if any(sorted(chain.from_iterable(plan)) != list(range(heads)) for plan in plans):
        raise InputError(
            f"A plan does not hold each of {heads} heads exactly once.",
            hint="Use groupings as natural or refined make them.",
        )
    return plans


def _checked(counts: npt.ArrayLike, shape: tuple[int, int]) -> IntArray:
    table = np.array(counts, dtype=np.int64)
    if table.shape != shape:
        raise InputError(
            f"Counts of shape {table.shape} for plans of {shape[0]} layers × {shape[1]} heads.",
            hint="Give one row per layer and one column per head.",
        )
    if table.min(initial=0) < 0:
        raise InputError(f"A count of {table.min()} is below 0.", hint="Give counts of active tiles.")
    return table
