"""Run the program of a switch of the sharded dim, in one call or as a start and a finish."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, cast

from torch import Tensor

from weft.core.schedule import Schedule
from weft.program.steps import Wait
from weft.run.arena import Arena
from weft.run.bind import Bound, RunFrame
from weft.run.comm import Comm
from weft.run.execute import FORWARD, Runner
from weft.schedule.reverse import reverse


class Flight(NamedTuple):
    """A run whose messages are under way."""

    frame: RunFrame
    bound: Bound
    at: int
    """The next step to run."""
    runner: Runner


class SwitchRunner(Runner):
    """Run a switch, or the backward of one, on tensors of one shape."""

    def __init__(self, schedule: Schedule, comm: Comm, arena: Arena, *, name: str) -> None:
        super().__init__(schedule, comm, arena, name)
        self._spare: list[Runner] = []
        """Runners with memory of their own, for runs that later ones may overtake."""

    @cached_property
    def adjoint(self) -> SwitchRunner:
        name = f"{self.name} backward"
        # The adjoint of the adjoint is the switch itself.
        back = SwitchRunner(reverse(self.schedule), self.comm, self.arena, name=name)
        back.__dict__["adjoint"] = self
        return back

    def run(self, x: Tensor) -> Tensor:
        frame = _frame(self.comm, x)
        return _result(self.run_program(FORWARD, frame, {"home x": (x.contiguous(),)}), frame)

    def start(self, x: Tensor) -> Flight:
        """Send this rank's messages; `finish` waits for those of its peers."""
        # Memory is lent for one call only, which may end before this run does: send by the group.
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


def _frame(comm: Comm, x: Tensor) -> RunFrame:
    return RunFrame(comm, cast("Any", None), 1.0, x.device, cast("Any", None))


def _result(bound: Bound, frame: RunFrame) -> Tensor:
    return frame.slots[bound.program.slots["home y"]][0]
