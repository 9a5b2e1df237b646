"""Clocks: mark the time of every step of a program, on the host or a GPU, and align the ranks' clocks."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from weft.run import streams
from weft.run.bind import Bound, RunFrame
from weft.run.comm import Comm

ROUNDS = 8


class HostClock:
    """A clock whose marks are times."""

    mark = staticmethod(time.monotonic_ns)
    """Return a mark of this moment; its time is read later."""

    def nanoseconds(self, marks: list[int]) -> list[int]:
        """Return marks in the host's monotonic time."""
        return marks

    def begin(self) -> None:
        """Compare with the host's time again; earlier marks can no longer be read."""


class CudaClock:
    """A clock whose marks are events on the current stream. Not yet run on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begin()

    def mark(self) -> streams.Event:
        return streams.record(self.device, timing=True)

    def nanoseconds(self, marks: list[streams.Event]) -> list[int]:
        if marks:
            marks[-1].synchronize()
        # The time between two events is a 32-bit float: the further from the beginning, the coarser.
        return [self.host + round(self.base.elapsed_time(mark) * 1e6) for mark in marks]

    def begin(self) -> None:
        self.base = self.mark()
        self.base.synchronize()
        self.host = time.monotonic_ns()


DeviceClock = HostClock | CudaClock


def clock_of(device: torch.device) -> DeviceClock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


def run_marked(bound: Bound, frame: RunFrame, clock: DeviceClock, marks: list[Any]) -> None:
    """Run a program with a mark before and after every step; a step that fails leaves its last mark too."""
    if streams.is_capturing(frame.device):  # marks in a CUDA graph have no time
        bound.run(frame)
        return
    mark = clock.mark
    marks.append(mark())
    try:
        for call in bound.calls:
            call(frame)
            marks.append(mark())
    except BaseException:
        marks.append(mark())
        raise


class MarkedRuns:
    """Run programs with marks, which `take` reads when the runs are over."""

    def __init__(self) -> None:
        self._clocks: dict[torch.device, DeviceClock] = {}
        self._runs: list[tuple[Bound, Comm, DeviceClock, list[Any]]] = []

    def run(self, bound: Bound, frame: RunFrame) -> None:
        clock = self._clocks.get(frame.device)
        if clock is None:
            clock = self._clocks[frame.device] = clock_of(frame.device)
        marks: list[Any] = []
        self._runs.append((bound, frame.comm, clock, marks))
        run_marked(bound, frame, clock, marks)

    def take(self) -> list[tuple[Bound, Comm, list[int]]]:
        """Return the runs since the last call, each with its marks in nanoseconds."""
        runs, self._runs = self._runs, []
        return [(bound, comm, clock.nanoseconds(marks)) for bound, comm, clock, marks in runs]

    def rebase(self) -> None:
        for clock in self._clocks.values():
            clock.begin()


@dataclass(frozen=True)
class Alignment:
    """How the ranks' clocks differ, in nanoseconds."""

    shift: int
    """To subtract from this rank's monotonic time, for the trace's."""
    clocks: tuple[tuple[int, int], ...]
    """By rank, how far its clock is ahead of rank 0's, and the uncertainty of that."""


def align(comm: Comm) -> Alignment:
    """Compare the monotonic clocks of all ranks; the trace begins when rank 0 returns from here.

    No rank leaves a gathering before all have entered it. So a rank leaves after rank 0 enters, and enters
    before rank 0 leaves: each round bounds the offset of its clock from both sides. Where the bounds allow 0,
    as on one machine, the clocks are the same.
    """
    entered: list[list[int]] = []
    left: list[int] = []
    for _ in range(ROUNDS):
        entered.append([row[0] for row in comm.all_gather_ints([time.monotonic_ns()])])
        left.append(time.monotonic_ns())
    left_by_rank = comm.all_gather_ints(left)
    clocks: list[tuple[int, int]] = []
    for rank, own_left in enumerate(left_by_rank):
        most = min(leave - row[0] for leave, row in zip(own_left, entered, strict=True))
        least = max(row[rank] - leave for row, leave in zip(entered, left_by_rank[0], strict=True))
        ahead = 0 if least <= 0 <= most else (least + most) // 2
        clocks.append((ahead, (most - least) // 2))
    return Alignment(left_by_rank[0][-1] + clocks[comm.rank][0], tuple(clocks))
