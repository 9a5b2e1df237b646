"""Which ranks work on which jobs until something changes. Policies are pure: no clock, no thread, no memory.

    runs = elastic(tasks, now, world, latency)

A policy is asked again when a job came or ended, and as steps are made. A running task that it gives the
same ranks goes on; one that it gives others, or none, stops at the end of its step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import ceil, inf, isfinite
from typing import Any, NamedTuple

from weft.serve.jobs import Shape
from weft.serve.tasks import Grant, Policy, Task, Times, groups, sizes

MOST_JOBS = 8
AGED = 3.0  # times what a task was allowed: who waited so long goes first, whatever its chances
MARGIN = 0.95  # of the time that is left: predictions err, and somebody may come
THRIFT = 1.25  # times the least rank-seconds: what a task may cost to be done sooner
LEAN = 1.02  # the same where there is more work than time
PAYS = 0.95  # a batch that takes so much of its jobs one by one, or less, is worth its wait


def all_ranks(tasks: Sequence[Task], _now: float, world: int, _latency: Times) -> list[Grant]:
    """First come, first served, by all ranks; nothing is stopped."""
    if running := [task for task in tasks if task.ranks]:
        return [Grant((task.id,), task.ranks) for task in running]
    return [Grant((task.id,), tuple(range(world))) for task in sorted(tasks, key=_came)[:1]]


def one_rank(tasks: Sequence[Task], _now: float, world: int, latency: Times) -> list[Grant]:
    """First come, first served, by one rank each (or as few as it fits on); nothing is stopped."""
    runs = [Grant((task.id,), task.ranks) for task in tasks if task.ranks]
    taken = {rank for run in runs for rank in run.ranks}
    for task in sorted((task for task in tasks if not task.ranks), key=_came):
        size = next((n for n in sizes(world) if isfinite(latency.step(task.shape, n, task.jobs))), world)
        spot = next((g for g in groups(world) if len(g) == size and taken.isdisjoint(g)), None)
        if spot is None:
            break
        taken.update(spot)
        runs.append(Grant((task.id,), spot))
    return runs


def _came(task: Task) -> tuple[int, float, str]:
    return -task.priority, task.arrived, task.id


def elastic(tasks: Sequence[Task], now: float, world: int, latency: Times) -> list[Grant]:
    """As few ranks each as meet its deadline, the earliest first; what is spare goes where it shortens most.

    Who is late is given its time once more. Where not all can be in time, the longest of those who are late,
    or else of all, is given up until the others can; it runs after them on what they leave, until it is
    `AGED`. A priority goes before all but age.
    """
    clock = _Clock(now, world, latency)
    tasks = [task for task in tasks if isfinite(min(clock.seconds(task)))]  # others fit on no ranks
    steps = [clock.step(task, len(task.ranks)) for task in tasks if task.ranks]
    clock.move += max(filter(isfinite, steps), default=0.0)  # decoding may be where steps do not fit
    dues = {task.id: clock.due(task) for task in tasks}
    given_up = _given_up(tasks, dues, clock)

    longest = max((task.deadline - task.arrived for task in tasks), default=0.0)

    def turn(task: Task) -> tuple[Any, ...]:
        aged = clock.aged(task)
        # Among the aged none may pass, or an endless stream of them would for ever; but who runs may end.
        first = task.deadline - longest * bool(task.ranks)
        rank = (0, False, first) if aged else (-task.priority, task.id in given_up, dues[task.id].at)
        return not clock.ends(task), not aged, *rank, task.arrived, task.id

    crowded = any(not due.late for due in dues.values())
    seats: list[_Seat] = []
    free, soon = world, inf
    for task in sorted(tasks, key=turn):
        need = 0 if task.id in given_up else dues[task.id].ranks
        thrifty = clock.thrifty(task, LEAN if given_up else THRIFT)
        wanted = len(task.ranks) if clock.ends(task) else max(need, thrifty)
        here = len(task.ranks)
        if crowded and clock.aged(task) and not clock.ends(task):
            wanted = min(wanted, clock.half(task))  # the rest is for those who can be in time
        # On fewer it may be late, and then on more again.
        shrinks = need and wanted < here and not clock.has_time(task, wanted, dues[task.id])
        if shrinks or (here and need <= here < wanted):
            wanted = here
        size = clock.size(task, wanted, free, soon)
        if size:
            seats.append(_Seat([task], size))
            free, soon = free - size, min(soon, clock.on(task, size))
        elif not task.began:
            _join(task, seats, clock, dues)
    for seat in seats:
        here = len(seat.task.ranks)
        if seat.size < here <= seat.size + free:
            free, seat.size = free - here + seat.size, here
    _grow(seats, free, clock)
    return _place(seats, world)


class _Due(NamedTuple):
    """When a task is to end, and the fewest ranks that do it."""

    at: float
    ranks: int
    late: bool


@dataclass
class _Seat:
    """Tasks that are to run as one, and on how many ranks."""

    tasks: list[Task]
    size: int

    @property
    def task(self) -> Task:
        """All of them as one."""
        if len(self.tasks) == 1:
            return self.tasks[0]
        return replace(self.tasks[0], jobs=sum(task.jobs for task in self.tasks))


class _Clock:
    """How long tasks would take from now, on how many ranks."""

    def __init__(self, now: float, world: int, latency: Times) -> None:
        self.now, self.world, self.latency, self.sizes = now, world, latency, sizes(world)
        self.move = latency.switch
        self._rows: dict[tuple[Shape, int], tuple[list[float], float]] = {}

    def row(self, shape: Shape, jobs: int) -> tuple[list[float], float]:
        """Seconds of a step by size, and of the end."""
        key = shape, jobs
        if key not in self._rows:
            steps = [self.latency.step(shape, size, jobs) for size in self.sizes]
            self._rows[key] = steps, self.latency.fixed(shape) * jobs
        return self._rows[key]

    def seconds(self, task: Task) -> list[float]:
        """To its end, by size."""
        steps, fixed = self.row(task.shape, task.jobs)
        return [(task.left * step if task.left else 0.0) + fixed for step in steps]

    def step(self, task: Task, size: int) -> float:
        return self.row(task.shape, task.jobs)[0][self.sizes.index(size)]

    def on(self, task: Task, size: int) -> float:
        return self.seconds(task)[self.sizes.index(size)]

    def ends(self, task: Task) -> bool:
        """Whether it is decoded now."""
        return not task.left and bool(task.ranks)

    def aged(self, task: Task) -> bool:
        return self.now - task.arrived > AGED * (task.deadline - task.arrived)

    def half(self, task: Task) -> int:
        """The largest group that leaves ranks to others, if the task fits on it."""
        size = self.sizes[-2:][0]
        return size if isfinite(self.step(task, size)) else self.world

    def due(self, task: Task) -> _Due:
        """Its deadline, or the first multiple of what it was allowed that it can still meet."""
        if self.ends(task):
            return _Due(task.deadline, len(task.ranks), late=False)
        took = dict(zip(self.sizes, self.seconds(task), strict=True))
        best, allowed = min(took.values()), max(task.deadline - task.arrived, self.latency.switch)
        times = max(1, ceil((self.now + best - task.arrived) / allowed))
        due = task.arrived + times * allowed
        slack = due - self.now
        sure = [
            n for n in self.sizes if took[n] <= MARGIN * slack or (n == len(task.ranks) and took[n] <= slack)
        ]
        fewest = next(iter(sure), min(took, key=lambda n: (took[n], n)))
        return _Due(due, fewest, late=times > 1)

    def has_time(self, task: Task, size: int, due: _Due) -> bool:
        """To move there, and to end."""
        return self.on(task, size) + self.move <= MARGIN * (due.at - self.now)

    def thrifty(self, task: Task, times: float) -> int:
        """The most ranks that spend little more of their time on it than the fewest would.

        It is better to end one after the other than all at once: some end sooner and none later, and steps
        are short for those who wait for one.
        """
        spent = [n * took for n, took in zip(self.sizes, self.seconds(task), strict=True)]
        return max(n for n, cost in zip(self.sizes, spent, strict=True) if cost <= times * min(spent))

    def size(self, task: Task, wanted: int, free: int, soon: float) -> int:
        """What it gets of what is free, if others end `soon`; 0 if it does better to wait for them.

        A step can not be stopped: a slow one on few ranks may end after a fast one that begins later.
        """
        most = bisect_right(self.sizes, min(wanted, free))
        if not most or not isfinite(self.on(task, size := self.sizes[most - 1])):
            return 0
        step = self.step(task, size)
        patient = step > soon + self.step(task, wanted) and size != len(task.ranks)
        return 0 if patient else size


def _given_up(tasks: Iterable[Task], dues: dict[str, _Due], clock: _Clock) -> set[str]:
    """Those that are to be late, as few as possible: Moore and Hodgson's rule, on all ranks as one machine.

    The work of a task is what ranks spend on it, as many as it needs.
    """
    work = {task.id: dues[task.id].ranks * clock.on(task, dues[task.id].ranks) for task in tasks}
    kept: list[tuple[int, bool, float, float, str]] = []
    total, late = 0.0, set[str]()
    for task in sorted(tasks, key=lambda task: (dues[task.id].at, task.id)):
        due = dues[task.id]
        heappush(kept, (task.priority, not due.late, -work[task.id] / task.jobs, -task.arrived, task.id))
        total += work[task.id]
        while kept and total > clock.world * (due.at - clock.now):
            name = heappop(kept)[-1]
            total -= work[name]
            late.add(name)
    return late


def _join(task: Task, seats: list[_Seat], clock: _Clock, dues: dict[str, _Due]) -> None:
    """Begin with another of its shape, if that saves time and makes nobody late."""
    for seat in seats:
        one = seat.task
        if one.began or one.shape != task.shape or one.jobs + task.jobs > MOST_JOBS:
            continue
        both = replace(one, jobs=one.jobs + task.jobs)
        apart = clock.step(one, seat.size) + clock.step(task, seat.size)
        ends = clock.now + clock.on(both, seat.size)
        in_time = all(ends <= dues[each.id].at for each in (*seat.tasks, task))
        if in_time and clock.step(both, seat.size) <= PAYS * apart:
            seat.tasks.append(task)
            return


def _grow(seats: list[_Seat], free: int, clock: _Clock) -> None:
    """Give spare ranks to whom they save most seconds each; a running task has to win back its move."""
    while free:
        saved, at = max(((_saved(seat, free, clock), -at) for at, seat in enumerate(seats)), default=(0.0, 0))
        if saved <= 0:
            return
        seat = seats[-at]
        more = clock.sizes[clock.sizes.index(seat.size) + 1]
        free, seat.size = free - more + seat.size, more


def _saved(seat: _Seat, free: int, clock: _Clock) -> float:
    """Seconds that the next larger group would save, for each rank more."""
    at, here = clock.sizes.index(seat.size), len(seat.task.ranks)
    if at + 1 == len(clock.sizes) or clock.sizes[at + 1] - seat.size > free:
        return 0.0
    more, seconds = clock.sizes[at + 1], clock.seconds(seat.task)
    move = clock.move if seat.size == here else 0.0
    return (seconds[at] - seconds[at + 1] - move) / (more - seat.size)


def _place(seats: list[_Seat], world: int) -> list[Grant]:
    """A group for each, the largest first, so that all fit; who runs stays, and others go where none do."""
    busy = {rank for seat in seats for task in seat.tasks for rank in task.ranks}
    taken: set[int] = set()
    runs: dict[int, Grant] = {}
    for size in sorted({seat.size for seat in seats}, reverse=True):
        here = [at for at, seat in enumerate(seats) if seat.size == size]
        stay = [at for at in here if _may_stay(seats[at], taken)]
        for at in stay:
            runs[at] = _run(seats[at], seats[at].task.ranks, taken)
        for at in here:
            if at in runs:
                continue
            spots = [range(start, start + size) for start in range(0, world - size + 1, size)]
            spot = min(
                (spot for spot in spots if not taken.intersection(spot)),
                key=lambda spot: (len(busy.intersection(spot)), spot.start),
            )
            runs[at] = _run(seats[at], tuple(spot), taken)
    return [runs[at] for at in range(len(seats))]


def _may_stay(seat: _Seat, taken: set[int]) -> bool:
    ranks = seat.task.ranks
    return len(ranks) == seat.size and not taken.intersection(ranks)


def _run(seat: _Seat, ranks: tuple[int, ...], taken: set[int]) -> Grant:
    taken.update(ranks)
    return Grant(tuple(task.id for task in seat.tasks), ranks)


POLICIES: dict[str, Policy] = {"elastic": elastic, "all": all_ranks, "one": one_rank}
