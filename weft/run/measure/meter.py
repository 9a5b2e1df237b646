"""Meter: add up how long this rank computes attention and waits for others, while programs run."""

from __future__ import annotations

import time
from typing import ClassVar, NamedTuple
from weakref import WeakSet

from weft.core.schedule import Schedule
from weft.program.steps import Attention, Gradient, Wait
from weft.run.bind import Bound, RunFrame
from weft.run.comm import Comm
from weft.run.measure.clocks import MarkedRuns


class MeterTotals(NamedTuple):
    """Nanoseconds; bytes sent; attentions, and how many of them ran a plan for the first time."""

    attending: int = 0
    waiting: int = 0
    sent: int = 0
    runs: int = 0
    first: int = 0


REBASE_SECONDS = 30.0
"""Times of GPU events are 32-bit milliseconds since a clock began: after so long they are off by 4 µs."""


class Meter:
    """A `ProgramObserver` that writes nothing.

    On a host a mark of time for each step costs nothing, and every run is marked. On a GPU marks are events,
    so one attention of those between two calls of `take` is marked, and stands for all of them.
    """

    _known: ClassVar[WeakSet[Schedule]] = WeakSet()

    def __init__(self) -> None:
        self._runs = self._first = self._sent = 0
        self.density: float | None = None
        """Of the last mask."""
        self.plans: dict[tuple[str, int], None] = {}
        """Names and ranks of the schedules of attention that were run, in order."""
        self.last: tuple[Bound, Comm, list[int]] | None = None
        """The last marked attention that `take` has counted, and its marks in nanoseconds."""
        self._marked = MarkedRuns()
        self._sample = 0
        """The number of the run to be marked on a GPU: one in the middle of a denoising step."""
        self._rebased = time.monotonic()

    def run(self, bound: Bound, frame: RunFrame) -> None:
        program, schedule = bound.program, bound.schedule
        is_marked = frame.device.type != "cuda" or (program.attends and self._runs == self._sample)
        if program.attends:
            self.plans[schedule.name, frame.comm.size] = None
            self._runs, self._first = self._runs + 1, self._first + (schedule not in self._known)
            self._known.add(schedule)
            self.density = schedule.attention[1].density
        self._sent += program.bytes_sent
        if is_marked:
            self._marked.run(bound, frame)
        else:
            bound.run(frame)

    def names(self, ranks: int) -> list[str]:
        """Return the plans that ran on several ranks; on fewer than `ranks`, with their number."""
        return [name if size == ranks else f"{name} on {size}" for name, size in self.plans if size > 1]

    def take(self) -> MeterTotals:
        """Return the totals since the last call."""
        attending = waiting = attentions = 0
        for bound, comm, times in self._marked.take():
            program = bound.program
            for step, start, end in zip(program.steps, times, times[1:], strict=False):
                attending += (end - start) * isinstance(step, Attention | Gradient)
                waiting += (end - start) * isinstance(step, Wait)
            if program.attends and times:
                attentions, self.last = attentions + 1, (bound, comm, times)
        share = self._runs / attentions if attentions else 1.0
        attending, waiting = round(attending * share), round(waiting * share)
        totals = MeterTotals(attending, waiting, self._sent, self._runs, self._first)
        self._sample = self._runs // 2
        self._runs = self._first = self._sent = 0
        if time.monotonic() - self._rebased > REBASE_SECONDS:
            self._rebased = time.monotonic()
            self._marked.rebase()
        return totals
