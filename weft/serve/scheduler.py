"""Scheduling policies: which ranks run which batches. They are pure functions: no clock, no thread, no state.

    assignments = elastic(batches, now, world, latency)

The engine calls its policy when a job comes or ends, and as steps are made. A running batch that is assigned
the same ranks continues; one that is assigned others, or none, stops at the end of its step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import ceil, inf, isfinite
from typing import NamedTuple

from weft.serve.assignment import Policy, RankAssignment, StepTimes, groups, sizes
from weft.serve.batch import Batch
from weft.serve.jobs import JobShape

MAX_JOBS = 8
STARVATION_FACTOR = 3.0
"""A batch that waited so many times its allowed time goes first, whatever its chances."""
DEADLINE_MARGIN = 0.95
"""Share of the remaining time that plans may fill: predictions err, and other jobs may come."""
MAX_COST_RATIO = 1.25
"""Rank-seconds that a batch may cost to end sooner, over the fewest possible."""
MAX_COST_RATIO_OVERLOADED = 1.02
"""The same where there is more work than time."""
MAX_BATCH_RATIO = 0.95
"""Largest step time of a batch, over the sum of its jobs one by one, that is worth the wait."""


def all_ranks(batches: Sequence[Batch], _now: float, world: int, _latency: StepTimes) -> list[RankAssignment]:
    """First come, first served, on all ranks; nothing is stopped."""
    if running := [batch for batch in batches if batch.ranks]:
        return [RankAssignment((batch.id,), batch.ranks) for batch in running]
    return [RankAssignment((batch.id,), tuple(range(world))) for batch in sorted(batches, key=_arrival)[:1]]


def one_rank(batches: Sequence[Batch], _now: float, world: int, latency: StepTimes) -> list[RankAssignment]:
    """First come, first served, on one rank each (or the fewest that it fits on); nothing is stopped."""
    assignments = [RankAssignment((batch.id,), batch.ranks) for batch in batches if batch.ranks]
    taken = {rank for each in assignments for rank in each.ranks}
    for batch in sorted((batch for batch in batches if not batch.ranks), key=_arrival):
        fits = (n for n in sizes(world) if isfinite(latency.step(batch.shape, n, len(batch.jobs))))
        size = next(fits, world)
        group = next((g for g in groups(world) if len(g) == size and taken.isdisjoint(g)), None)
        if group is None:
            break
        taken.update(group)
        assignments.append(RankAssignment((batch.id,), group))
    return assignments


def _arrival(batch: Batch) -> tuple[int, float, str]:
    return -batch.priority, batch.arrived, batch.id


def elastic(batches: Sequence[Batch], now: float, world: int, latency: StepTimes) -> list[RankAssignment]:
    """Assign each batch the fewest ranks that meet its deadline, then spare ranks where they save most time.

    The earliest deadline goes first; a late batch is allowed its time once more. If not all can be in time,
    the longest of the late ones, or else of all, is deferred until the others can: it runs after them, on the
    ranks that they leave, until `STARVATION_FACTOR`. Priorities go before all but that.
    """
    clock = _Clock(now, world, latency)
    batches = [batch for batch in batches if isfinite(min(clock.seconds(batch)))]  # others fit on no ranks
    steps = [clock.step(batch, len(batch.ranks)) for batch in batches if batch.ranks]
    clock.move += max(filter(isfinite, steps), default=0.0)  # decoding may be where steps do not fit
    dues = {batch.id: clock.due(batch) for batch in batches}
    deferred = _deferred(batches, dues, clock)

    longest = max((batch.deadline - batch.arrived for batch in batches), default=0.0)

    def order(batch: Batch) -> tuple[float | str, ...]:
        starved = clock.starved(batch)
        # Starved batches go by their deadlines, or an endless stream of them would pass some for ever; but
        # those that run may end.
        first = batch.deadline - longest * bool(batch.ranks)
        key = (0, False, first) if starved else (-batch.priority, batch.id in deferred, dues[batch.id].at)
        return not clock.ends(batch), not starved, *key, batch.arrived, batch.id

    crowded = any(not due.late for due in dues.values())
    shares: list[_Share] = []
    free, soon = world, inf
    for batch in sorted(batches, key=order):
        need = 0 if batch.id in deferred else dues[batch.id].ranks
        thrifty = clock.thrifty(batch, MAX_COST_RATIO_OVERLOADED if deferred else MAX_COST_RATIO)
        current = len(batch.ranks)
        wanted = current if clock.ends(batch) else max(need, thrifty)
        if crowded and clock.starved(batch) and not clock.ends(batch):
            wanted = min(wanted, clock.half(batch))  # the rest is for those that can be in time
        # With fewer ranks it may become late, and would then get more again.
        shrinks = need and wanted < current and not clock.has_time(batch, wanted, dues[batch.id])
        if shrinks or (current and need <= current < wanted):
            wanted = current
        size = clock.size(batch, wanted, free, soon)
        if size:
            shares.append(_Share([batch], size))
            free, soon = free - size, min(soon, clock.on(batch, size))
        elif not batch.began:
            _merge(batch, shares, clock, dues)
    for share in shares:
        current = len(share.first.ranks)
        if share.size < current <= share.size + free:
            free, share.size = free - current + share.size, current
    _grow(shares, free, clock)
    return _place(shares, world)


class _Due(NamedTuple):
    """When a task is to end, and the fewest ranks that do it."""

    at: float
    ranks: int
    late: bool


@dataclass
class _Share:
    """Batches that are to run as one, and on how many ranks."""

    batches: list[Batch]
    size: int

    @property
    def first(self) -> Batch:
        return self.batches[0]

    @property
    def jobs(self) -> int:
        return sum(len(batch.jobs) for batch in self.batches)


class _Clock:
    """How long batches would take from now, by number of ranks."""

    def __init__(self, now: float, world: int, latency: StepTimes) -> None:
        self.now, self.world, self.latency, self.sizes = now, world, latency, sizes(world)
        self.move = latency.switch
        self._times: dict[tuple[JobShape, int], tuple[list[float], float]] = {}

    def times(self, shape: JobShape, jobs: int) -> tuple[list[float], float]:
        """Return the seconds of a step by size, and those of decoding and writing."""
        key = shape, jobs
        if key not in self._times:
            steps = [self.latency.step(shape, size, jobs) for size in self.sizes]
            self._times[key] = steps, self.latency.fixed(shape) * jobs
        return self._times[key]

    def seconds(self, batch: Batch, jobs: int = 0) -> list[float]:
        """Return the seconds to its end by size, with as many `jobs` as it has or as are given."""
        steps, fixed = self.times(batch.shape, jobs or len(batch.jobs))
        return [(batch.left * step if batch.left else 0.0) + fixed for step in steps]

    def step(self, batch: Batch, size: int, jobs: int = 0) -> float:
        return self.times(batch.shape, jobs or len(batch.jobs))[0][self.sizes.index(size)]

    def on(self, batch: Batch, size: int, jobs: int = 0) -> float:
        return self.seconds(batch, jobs)[self.sizes.index(size)]

    def ends(self, batch: Batch) -> bool:
        """Return whether it is being decoded."""
        return not batch.left and bool(batch.ranks)

    def starved(self, batch: Batch) -> bool:
        return self.now - batch.arrived > STARVATION_FACTOR * (batch.deadline - batch.arrived)

    def half(self, batch: Batch) -> int:
        """Return the largest group that leaves ranks to others, if the batch fits on it."""
        size = self.sizes[-2:][0]
        return size if isfinite(self.step(batch, size)) else self.world

    def due(self, batch: Batch) -> _Due:
        """Return its deadline, or the first multiple of its allowed time that it can still meet."""
        if self.ends(batch):
            return _Due(batch.deadline, len(batch.ranks), late=False)
        seconds = dict(zip(self.sizes, self.seconds(batch), strict=True))
        best, allowed = min(seconds.values()), max(batch.deadline - batch.arrived, self.latency.switch)
        times = max(1, ceil((self.now + best - batch.arrived) / allowed))
        due = batch.arrived + times * allowed
        slack, current = due - self.now, len(batch.ranks)
        margins = {n: 1.0 if n == current else DEADLINE_MARGIN for n in self.sizes}
        in_time = (n for n in self.sizes if seconds[n] <= margins[n] * slack)
        fewest = next(in_time, min(seconds, key=lambda n: (seconds[n], n)))
        return _Due(due, fewest, late=times > 1)

    def has_time(self, batch: Batch, size: int, due: _Due) -> bool:
        """Return whether it can move to so many ranks and end in time."""
        return self.on(batch, size) + self.move <= DEADLINE_MARGIN * (due.at - self.now)

    def thrifty(self, batch: Batch, max_ratio: float) -> int:
        """Return the most ranks whose total time is at most `max_ratio` of the least possible.

        Ending one batch after the other is better than all at once: some end sooner and none later, and steps
        are short for those that wait for one.
        """
        costs = [n * seconds for n, seconds in zip(self.sizes, self.seconds(batch), strict=True)]
        return max(n for n, cost in zip(self.sizes, costs, strict=True) if cost <= max_ratio * min(costs))

    def size(self, batch: Batch, wanted: int, free: int, soon: float) -> int:
        """Return how many of the free ranks it gets; 0 if waiting for others, that end `soon`, is better.

        A step cannot be stopped: a slow one on few ranks may end after a fast one that begins later.
        """
        most = bisect_right(self.sizes, min(wanted, free))
        if not most or not isfinite(self.on(batch, size := self.sizes[most - 1])):
            return 0
        step = self.step(batch, size)
        waits = step > soon + self.step(batch, wanted) and size != len(batch.ranks)
        return 0 if waits else size


def _deferred(batches: Iterable[Batch], dues: dict[str, _Due], clock: _Clock) -> set[str]:
    """Return as few batches as possible that are to be late: Moore and Hodgson, all ranks as one machine.

    The work of a batch is the time of all ranks that it needs.
    """
    work = {batch.id: dues[batch.id].ranks * clock.on(batch, dues[batch.id].ranks) for batch in batches}
    heap: list[tuple[int, bool, float, float, str]] = []
    total, late = 0.0, set[str]()
    for batch in sorted(batches, key=lambda batch: (dues[batch.id].at, batch.id)):
        due, per_job = dues[batch.id], work[batch.id] / len(batch.jobs)
        heappush(heap, (batch.priority, not due.late, -per_job, -batch.arrived, batch.id))
        total += work[batch.id]
        while heap and total > clock.world * (due.at - clock.now):
            name = heappop(heap)[-1]
            total -= work[name]
            late.add(name)
    return late


def _merge(batch: Batch, shares: list[_Share], clock: _Clock, dues: dict[str, _Due]) -> None:
    """Let a batch begin with another of its shape, if that saves time and makes none late."""
    for share in shares:
        first, jobs = share.first, share.jobs + len(batch.jobs)
        if first.began or first.shape != batch.shape or jobs > MAX_JOBS:
            continue
        apart = clock.step(first, share.size, share.jobs) + clock.step(batch, share.size)
        ends = clock.now + clock.on(first, share.size, jobs)
        in_time = all(ends <= dues[each.id].at for each in (*share.batches, batch))
        if in_time and clock.step(first, share.size, jobs) <= MAX_BATCH_RATIO * apart:
            share.batches.append(batch)
            return


def _grow(shares: list[_Share], free: int, clock: _Clock) -> None:
    """Give spare ranks where they save most seconds each; a running batch has to win back its move."""
    while free:
        saved, at = max(
            ((_saved(share, free, clock), -at) for at, share in enumerate(shares)), default=(0.0, 0)
        )
        if saved <= 0:
            return
        share = shares[-at]
        more = clock.sizes[clock.sizes.index(share.size) + 1]
        free, share.size = free - more + share.size, more


def _saved(share: _Share, free: int, clock: _Clock) -> float:
    """Return the seconds that the next larger group would save, for each additional rank."""
    at = clock.sizes.index(share.size)
    if at + 1 == len(clock.sizes) or clock.sizes[at + 1] - share.size > free:
        return 0.0
    more, seconds = clock.sizes[at + 1], clock.seconds(share.first, share.jobs)
    move = clock.move if share.size == len(share.first.ranks) else 0.0
    return (seconds[at] - seconds[at + 1] - move) / (more - share.size)


def _place(shares: list[_Share], world: int) -> list[RankAssignment]:
    """Choose a group for each, the largest first, so that all fit. Running batches stay where they can."""
    busy = {rank for share in shares for batch in share.batches for rank in batch.ranks}
    taken: set[int] = set()
    chosen: dict[int, tuple[int, ...]] = {}
    for size in sorted({share.size for share in shares}, reverse=True):
        here = [at for at, share in enumerate(shares) if share.size == size]
        for at in here:
            ranks = shares[at].first.ranks
            if len(ranks) == size and taken.isdisjoint(ranks):
                chosen[at] = ranks
                taken.update(ranks)
        for at in here:
            if at not in chosen:
                chosen[at] = min(
                    (g for g in groups(world) if len(g) == size and taken.isdisjoint(g)),
                    key=lambda group: (len(busy.intersection(group)), group),
                )
                taken.update(chosen[at])
    return [
        RankAssignment(tuple(batch.id for batch in share.batches), chosen[at])
        for at, share in enumerate(shares)
    ]


POLICIES: dict[str, Policy] = {"elastic": elastic, "all": all_ranks, "one": one_rank}
