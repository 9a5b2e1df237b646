"""Meter: how long this rank computes attention and waits for others, added up while programs run."""

from __future__ import annotations

import time
from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch

from weft.core.schedule import Schedule
from weft.program.steps import Attention, Gradient, Wait
from weft.run.bind import Bound, Frame
from weft.run.clocks import Clock, clock_of
from weft.run.comm import Comm
from weft.run.recorder import run_marked


class Spent(NamedTuple):
    """Nanoseconds; bytes that were sent; attentions, and those of which the plan was not there yet."""

    attending: int = 0
    waiting: int = 0
    sent: int = 0
    runs: int = 0
    first: int = 0


REBASE_SECONDS = 30.0
"""Times of GPU events are 32-bit milliseconds since a clock began: after so long they are off by 4 µs."""


class Marked(NamedTuple):
    """One run of a program with a mark before and after every step."""

    bound: Bound
    comm: Comm
    clock: Clock
    marks: list[Any]


class Meter:
    """A `Watch` that writes nothing.

    On a host a mark of time for each step costs nothing, and every run is marked. On a GPU marks are events,
    so one attention of those between two calls of `take` is marked, and stands for all of them.
    """

    _known: ClassVar[WeakSet[Schedule]] = WeakSet()

    def __init__(self) -> None:
        self._runs = self._first = self._sent = 0
        self.density: float | None = None
        """What the last mask left."""
        self.plans: dict[tuple[str, int], None] = {}
        """Names and ranks of the schedules of attention that were run, in order."""
        self.last: tuple[Bound, Comm, list[int]] | None = None
        """The last marked attention that `take` has counted, and its marks in nanoseconds."""
        self._clocks: dict[torch.device, Clock] = {}
        self._marked: list[Marked] = []
        self._sample = 0
        """The number of the run to be marked on a GPU: one in the middle of a denoising step."""
        self._rebased = time.monotonic()

    def run(self, bound: Bound, frame: Frame) -> None:
        program, schedule, device = bound.program, bound.schedule, frame.device
        every = device.type != "cuda"
        marks = every or (program.attends and self._runs == self._sample)
        if program.attends:
            self.plans[schedule.name, frame.comm.size] = None
            self._runs, self._first = self._runs + 1, self._first + (schedule not in self._known)
            self._known.add(schedule)
            self.density = schedule.attention[1].density
        self._sent += program.bytes_sent
        if not marks:
            bound.run(frame)
            return
        if device not in self._clocks:
            self._clocks[device] = clock_of(device)
        self._marked.append(Marked(bound, frame.comm, self._clocks[device], []))
        run_marked(bound, frame, *self._marked[-1][2:])

    def names(self, ranks: int) -> list[str]:
        """What was run on more than one rank; on fewer than there are, on how many."""
        return [name if size == ranks else f"{name} on {size}" for name, size in self.plans if size > 1]

    def take(self) -> Spent:
        """What was spent since this was last asked."""
        attending = waiting = attentions = 0
        for bound, comm, clock, marks in self._marked:
            program, times = bound.program, clock.nanoseconds(marks)
            for step, start, end in zip(program.steps, times, times[1:], strict=False):
                attending += (end - start) * isinstance(step, Attention | Gradient)
                waiting += (end - start) * isinstance(step, Wait)
            if program.attends and times:
                attentions, self.last = attentions + 1, (bound, comm, times)
        share = self._runs / attentions if attentions else 1.0
        spent = Spent(round(attending * share), round(waiting * share), self._sent, self._runs, self._first)
        self._sample = self._runs // 2
        self._runs = self._first = self._sent = 0
        self._marked.clear()
        if time.monotonic() - self._rebased > REBASE_SECONDS:
            self._rebased = time.monotonic()
            for clock in self._clocks.values():
                clock.begin()
        return spent
