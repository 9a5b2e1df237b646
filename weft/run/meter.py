"""Meter: how long this rank computes attention and waits for others, added up while programs run."""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple
from weakref import WeakSet

import torch

from weft.core.schedule import Schedule
from weft.program.steps import Attention, Gradient, Post, Program, Wait
from weft.run.bind import Bound, Frame
from weft.run.clocks import Clock, clock_of
from weft.run.recorder import run_marked


class Spent(NamedTuple):
    """Nanoseconds; bytes that were sent; attentions, and those of which the plan was not there yet."""

    attending: int = 0
    waiting: int = 0
    sent: int = 0
    runs: int = 0
    first: int = 0


class Meter:
    """A `Watch` that writes nothing: a mark of time for each step of a program is all that it costs."""

    _known: ClassVar[WeakSet[Schedule]] = WeakSet()

    def __init__(self) -> None:
        self._runs = self._first = 0
        self.density: float | None = None
        """What the last mask left."""
        self.plans: dict[tuple[str, int], None] = {}
        """Names and ranks of the schedules of attention that were run, in order."""
        self._clocks: dict[torch.device, Clock] = {}
        self._marked: list[tuple[Program, list[Any], Clock]] = []

    def run(self, bound: Bound, frame: Frame) -> None:
        program, schedule = bound.program, bound.schedule
        if frame.device not in self._clocks:
            self._clocks[frame.device] = clock_of(frame.device)
        clock, marks = self._clocks[frame.device], []
        if program.attends:
            self.plans[schedule.name, frame.comm.size] = None
            self._runs, self._first = self._runs + 1, self._first + (schedule not in self._known)
            self._known.add(schedule)
            self.density = schedule.attention[1].density
        self._marked.append((program, marks, clock))
        run_marked(bound, frame, clock, marks)

    def names(self, ranks: int) -> list[str]:
        """What was run on more than one rank; on fewer than there are, on how many."""
        return [name if size == ranks else f"{name} on {size}" for name, size in self.plans if size > 1]

    def take(self) -> Spent:
        """What was spent since this was last asked."""
        attending = waiting = sent = 0
        for program, marks, clock in self._marked:
            times = clock.nanoseconds(marks)
            for step, start, end in zip(program.steps, times, times[1:], strict=False):
                attending += (end - start) * isinstance(step, Attention | Gradient)
                waiting += (end - start) * isinstance(step, Wait)
                sent += step.num_bytes if isinstance(step, Post) else 0
        runs, first = self._runs, self._first
        self._runs = self._first = 0
        self._marked.clear()
        for clock in self._clocks.values():
            clock.begin()
        return Spent(attending, waiting, sent, runs, first)
