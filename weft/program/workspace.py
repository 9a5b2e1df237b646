"""Workspace: give the slots of a program their places in one block of memory, by their lifetimes.

A slot is live from the first step that writes it to the last one that reads it or waits for its message. Two
slots that are never live at the same time may lie in the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from random import Random
from typing import NamedTuple

import numpy as np

from weft.core.schedule import Schedule
from weft.program.lower import lower_all, without_collector
from weft.program.lowering import ALIGN
from weft.program.slots import Slot
from weft.program.steps import Gradient, Program, Target, Wait, accesses

MIN_SIZE_RATIO = 0.99
"""Sizes within this ratio are rounded up to the largest of them."""
GOOD_SIZE_RATIO, MAX_TRIES, MAX_TRIED_SLOTS = 1.02, 64, 20_000
"""A block within this ratio of its bound is good; else so many random orders are tried, of so many slots."""


class Life(NamedTuple):
    """Bytes, and the first and last step that a slot is needed at."""

    num_bytes: int
    first: int
    last: int


@dataclass(frozen=True)
class Workspace:
    """Places of slots: (block, offset), where block 0 is the workspace and the others are results.

    A result is written last, so until then its memory serves as workspace too.
    """

    places: dict[Slot, tuple[int, int]]
    num_bytes: int
    """Of block 0."""
    bound: int
    """The largest sum of slots in block 0 that are live at one step."""
    results: tuple[tuple[Slot, int], ...] = ()
    """Blocks 1, 2, …: a result and which of its tensors; keys and values are two."""


@dataclass(frozen=True)
class Memory:
    """Bytes that one rank holds while it runs a program."""

    own: int
    """The caller's tensors."""
    workspace: int
    saved: int
    """Slots that the forward saves and the backward reads."""
    results: int
    scratch: int = 0
    """The largest extra output of an attention kernel, which the total leaves out."""

    @property
    def total(self) -> int:
        return self.own + self.workspace + self.saved + self.results


def lives(program: Program, memory: str) -> dict[Slot, Life]:
    """Return the lifetimes of all slots of one kind of memory, in order of first use."""
    spans: dict[Slot, list[int]] = {}
    for at, step in enumerate(program.steps):
        slots = (step.slot,) if isinstance(step, Wait) else [s for some in accesses(step) for s in some]
        for slot in slots:
            root = slot if slot.parent is None else slot.root
            if root.memory == memory:
                spans.setdefault(root, [at, at])[1] = at
    return {slot: Life(slot.num_bytes, first, last) for slot, (first, last) in spans.items()}


def assign(program: Program) -> Workspace:
    """Lay out the workspace of a program: slots that are live at the same time do not overlap."""
    live = lives(program, "workspace")
    if program.target.lands:
        live |= lives(program, "peer")
    planes = [
        (slot, plane, life._replace(num_bytes=slot.num_bytes // slot.shape[0]))
        for slot, life in lives(program, "result").items()
        for plane in range(slot.shape[0])
    ]
    places, size, bound = _assign(tuple(live.values()), tuple(life for *_, life in planes))
    return Workspace(
        dict(zip(live, places, strict=True)), size, bound, tuple((slot, plane) for slot, plane, _ in planes)
    )


def window(program: Program) -> Workspace:
    """Lay out what peers read in place until the call ends, so that no byte is used twice."""
    places: dict[Slot, tuple[int, int]] = {}
    at = 0
    for slot, life in lives(program, "window").items():
        places[slot] = 0, at
        at += -(-life.num_bytes // ALIGN) * ALIGN
    return Workspace(places, at, at)


@lru_cache(256)  # ranks of a ring have equal lifetimes
def _assign(
    live: tuple[Life, ...], results: tuple[Life, ...]
) -> tuple[tuple[tuple[int, int], ...], int, int]:
    """Return places, block size and its lower bound, from the best of several first-fit orders."""
    best: tuple[tuple[tuple[int, int], ...], int, int] = (), 0, 0
    orders: list[Callable[[int], tuple[float, ...]]] = [
        lambda i: (-live[i].num_bytes, live[i].first),
        lambda i: (live[i].first, -live[i].num_bytes),
        lambda i: (live[i].first - live[i].last, -live[i].num_bytes),
    ]
    shuffled = Random(0)  # the same on all ranks and in every run

    def roughly_by_size(i: int) -> tuple[float, ...]:
        return -live[i].num_bytes * shuffled.uniform(0.4, 1.0), live[i].first

    orders += [roughly_by_size] * min(MAX_TRIES, MAX_TRIED_SLOTS // max(1, len(live)))
    alike = _alike([life.num_bytes for life in live])
    for order in orders if live else ():
        layout = _first_fit(live, results, sorted(range(len(live)), key=order), alike)
        if not best[0] or layout[1] < best[1]:
            best = layout
        if best[1] <= GOOD_SIZE_RATIO * best[2]:
            break
    return best


def _alike(sizes: Sequence[int]) -> dict[int, int]:
    """Round sizes up to the largest of those that are nearly as large, so that one fits where another was.

    Shards differ by a token: without it, a chunk that is a little larger than the one before it has no gap.
    """
    rounded: dict[int, int] = {}
    largest = 0
    for size in sorted(set(sizes), reverse=True):
        if size < MIN_SIZE_RATIO * largest or not largest:
            largest = size
        rounded[size] = -(-largest // ALIGN) * ALIGN
    return rounded


def _first_fit(
    live: Sequence[Life], results: Sequence[Life], order: Sequence[int], alike: dict[int, int]
) -> tuple[tuple[tuple[int, int], ...], int, int]:
    """Put each slot into the lowest gap that is free as long as it lives; results first, then the block."""
    sizes = [life.num_bytes // ALIGN * ALIGN for life in results]
    blocks = [_Block(len(live)) for _ in range(1 + len(results))]
    places: list[tuple[int, int]] = [(0, 0)] * len(live)
    for i in order:
        exact, first, last = live[i]
        size = -(-exact // ALIGN) * ALIGN
        for number, block in enumerate(blocks[1:], start=1):
            at = block.gap(size, first, last) if last < results[number - 1].first else sizes[number - 1]
            if at + size <= sizes[number - 1]:
                break
        else:
            number, block = 0, blocks[0]
            size = alike[exact]
            at = block.gap(size, first, last)
        block.put(size, first, last, at, exact)
        places[i] = number, at
    return tuple(places), blocks[0].size, blocks[0].bound


class _Block:
    """Slots that have been placed in one stretch of memory."""

    def __init__(self, most: int) -> None:
        self.rows = np.zeros((most, 5), dtype=np.int64)
        self.count = self.size = 0

    def gap(self, size: int, first: int, last: int) -> int:
        """The lowest offset at which `size` bytes are free from step `first` to step `last`."""
        rows = self.rows[: self.count]
        rows = rows[(rows[:, 2] <= last) & (rows[:, 3] >= first)]
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        ends = np.insert(np.maximum.accumulate(rows[:, 0] + rows[:, 1]), 0, 0)
        starts = np.append(rows[:, 0], np.iinfo(np.int64).max)
        return int(ends[np.argmax(starts - ends >= size)])

    def put(self, size: int, first: int, last: int, at: int, exact: int) -> None:
        self.rows[self.count] = at, size, first, last, exact
        self.count += 1
        self.size = max(self.size, at + size)

    @property
    def bound(self) -> int:
        rows = self.rows[: self.count]
        change = np.zeros(rows[:, 3].max(initial=0) + 2, dtype=np.int64)
        np.add.at(change, rows[:, 2], rows[:, 4])
        np.subtract.at(change, rows[:, 3] + 1, rows[:, 4])
        return int(change.cumsum().max(initial=0))


def memory_of(program: Program) -> Memory:
    """Return the bytes that a rank holds while it runs a program."""
    by_kind = dict.fromkeys(("input", "saved", "result"), 0)
    for root in program.roots:
        if root.memory in by_kind:
            by_kind[root.memory] += root.num_bytes
    scratch = max((_scratch(step) for step in program.steps if isinstance(step, Gradient)), default=0)
    block = assign(program).num_bytes + window(program).num_bytes
    return Memory(by_kind["input"], block, by_kind["saved"], by_kind["result"], scratch)


def _scratch(step: Gradient) -> int:
    return step.q_piece.cells * step.dq.unit + step.kv_piece.cells * step.dkv.unit


def peak_memory(schedule: Schedule, target: Target | None = None) -> tuple[int, ...]:
    """Return the bytes that each rank holds while it runs a schedule, without kernel scratch."""
    with without_collector():
        return tuple([memory_of(program).total for program in lower_all(schedule, target or Target())])
