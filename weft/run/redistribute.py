"""Redistribute: run the program of a switch of the sharded dim, at once or with a wait of its own."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, cast

from torch import Tensor

from weft.core.schedule import Schedule
from weft.program.steps import Wait
from weft.run.arena import Arena
from weft.run.bind import Bound, Frame
from weft.run.comm import Comm
from weft.run.execute import FORWARD, Runner
from weft.schedule.reverse import reverse


class Flight(NamedTuple):
    """A run of which all messages are under way."""

    frame: Frame
    bound: Bound
    at: int
    """The first step that is still to be run."""
    runner: Runner


class Redistribution(Runner):
    """Runs a switch, or the backward of one, on tensors of one shape."""

    def __init__(self, schedule: Schedule, comm: Comm, arena: Arena, *, name: str) -> None:
        super().__init__(schedule, comm, arena, name)
        self._spare: list[Runner] = []
        """Runners whose memory is their own, for runs that others may overtake."""

    @cached_property
    def adjoint(self) -> Redistribution:
        name = f"{self.name} backward"
        # The backward of a backward is the switch itself.
        back = Redistribution(reverse(self.schedule), self.comm, self.arena, name=name)
        back.__dict__["adjoint"] = self
        return back

    def run(self, x: Tensor) -> Tensor:
        frame = _frame(self.comm, x)
        return _result(self.run_program(FORWARD, frame, {"home x": (x.contiguous(),)}), frame)

    def start(self, x: Tensor) -> Flight:
        """Send what leaves; `finish` waits for what comes."""
        # Memory that is lent for a call is free again before other calls end, so messages go by the group.
        comm = getattr(self.comm, "base", self.comm)
        runner = self._spare.pop() if self._spare else Runner(self.schedule, comm, Arena(), self.name)
        frame, before = _frame(comm, x), comm.bytes_sent
        bound = runner.begin(FORWARD, frame, {"home x": (x.contiguous(),)})
        steps = bound.program.steps
        at = next((i for i, step in enumerate(steps) if isinstance(step, Wait)), len(steps))
        for call in bound.calls[:at]:
            call(frame)
        if comm is not self.comm:
            self.comm.bytes_sent += comm.bytes_sent - before
        return Flight(frame, bound, at, runner)

    def finish(self, flight: Flight) -> Tensor:
        for call in flight.bound.calls[flight.at :]:
            call(flight.frame)
        self._spare.append(flight.runner)
        return _result(flight.bound, flight.frame)


def _frame(comm: Comm, x: Tensor) -> Frame:
    return Frame(comm, cast("Any", None), 1.0, x.device, cast("Any", None))


def _result(bound: Bound, frame: Frame) -> Tensor:
    return frame.slots[bound.program.slots["home y"]][0]
