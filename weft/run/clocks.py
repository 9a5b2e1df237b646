"""Clocks of a trace: marks of time on the host or on a GPU, and how the ranks' clocks lie to each other."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from weft.run import streams
from weft.run.comm import Comm

ROUNDS = 8


class Clock(Protocol):
    def mark(self) -> Any:
        """This moment, to be asked for its time later."""
        ...

    def nanoseconds(self, marks: list[Any]) -> list[int]:
        """Marks in the host's monotonic time."""
        ...

    def begin(self) -> None:
        """Compare with the host's time again; marks from before are not asked for any more."""
        ...


class HostClock:
    """Marks are times themselves."""

    mark = staticmethod(time.monotonic_ns)

    def nanoseconds(self, marks: list[int]) -> list[int]:
        return marks

    def begin(self) -> None:
        pass


class CudaClock:
    """Marks are events on the current stream. Written for GPUs, not yet run on one."""

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


def clock_of(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()


@dataclass(frozen=True)
class Alignment:
    """What takes a rank's clock to the trace's, and by rank what was found, all in nanoseconds."""

    shift: int
    """To take off this rank's monotonic time."""
    clocks: tuple[tuple[int, int], ...]
    """By rank, how much its clock is ahead of rank 0's, and how far that may be off."""


def align(comm: Comm) -> Alignment:
    """Compare the monotonic clocks of all ranks; the trace begins when rank 0 is done with it.

    Nobody leaves a gathering before everybody has come. So a rank leaves after rank 0 came and comes
    before rank 0 leaves, and each round bounds how far its clock is ahead, from both sides. Where the
    bounds allow 0, as on one machine, the clocks are the same.
    """
    came: list[list[int]] = []
    left: list[int] = []
    for _ in range(ROUNDS):
        came.append([row[0] for row in comm.gather_numbers([time.monotonic_ns()])])
        left.append(time.monotonic_ns())
    everyone = comm.gather_numbers(left)
    clocks: list[tuple[int, int]] = []
    for rank, theirs in enumerate(everyone):
        most = min(leave - row[0] for leave, row in zip(theirs, came, strict=True))
        least = max(row[rank] - leave for row, leave in zip(came, everyone[0], strict=True))
        ahead = 0 if least <= 0 <= most else (least + most) // 2
        clocks.append((ahead, (most - least) // 2))
    return Alignment(everyone[0][-1] + clocks[comm.rank][0], tuple(clocks))
