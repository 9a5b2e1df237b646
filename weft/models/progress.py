"""Progress: the live line of a pipeline under way, and what it adds up to."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, TextIO

from weft.core.units import clock
from weft.run.comm import Comm
from weft.run.meter import Meter


@dataclass(frozen=True, kw_only=True)
class Step:
    """One denoising step of all ranks."""

    seconds: float
    imbalance: float | None
    """Most of the ranks' time in attention, over the mean; None if weft computed none."""
    exposed: float
    """Share of the time in which ranks waited for each other, on average."""


class Progress:
    """Called by a pipeline after each step (`callback_on_step_end`), on every rank; rank 0 may show it."""

    def __init__(self, comm: Comm, meter: Meter, steps: int | None, stream: TextIO | None) -> None:
        self.comm, self.meter, self.steps, self.stream = comm, meter, steps, stream
        self.done: list[Step] = []
        self.began = time.monotonic()

    def __call__(self, pipe: Any, index: int, timestep: Any, given: Mapping[str, Any]) -> Mapping[str, Any]:  # noqa: ARG002
        now = time.monotonic()
        self.done.append(_step(self.comm.gather_numbers(list(self.meter.take())), now - self.began))
        self.began = now
        if self.stream is not None:
            total = getattr(pipe, "num_timesteps", None) or self.steps or 0
            self._show(line(self.done, total), last=len(self.done) == total)
        return given

    def summary(self) -> Step:
        """All steps as one; of several the first, in which plans are made and checked, does not count."""
        return _mean(self.done)

    def _show(self, text: str, *, last: bool) -> None:
        assert self.stream is not None
        if self.stream.isatty():
            print(f"\r{text}\x1b[K", end="\n" if last else "", file=self.stream, flush=True)
        else:
            print(text, file=self.stream, flush=True)


def terminal(*, rank: int, quiet: bool) -> TextIO | None:
    """Where the live line goes."""
    return None if quiet or rank else sys.stderr


def line(done: list[Step], total: int) -> str:
    """The live line after some steps."""
    mean, last = _mean(done), done[-1]
    parts = [
        f"step {len(done)}/{total}" if total else f"step {len(done)}",
        f"{mean.seconds:.2f} s/step",
        f"{clock(mean.seconds * max(0, total - len(done)))} left",
        *([] if last.imbalance is None else [f"imbalance in time {last.imbalance:.2f}"]),
        f"exposed communication {last.exposed:.1%}",
    ]
    return " · ".join(parts)


def _step(spent: list[list[int]], seconds: float) -> Step:
    attending = [row[0] for row in spent]
    return Step(
        seconds=seconds,
        imbalance=max(attending) / fmean(attending) if any(attending) else None,
        exposed=min(1.0, fmean(row[1] for row in spent) / (seconds * 1e9)),
    )


def _mean(done: list[Step]) -> Step:
    counted = done[1:] or done
    known = [step.imbalance for step in counted if step.imbalance is not None]
    return Step(
        seconds=fmean(step.seconds for step in counted),
        imbalance=fmean(known) if known else None,
        exposed=fmean(step.exposed for step in counted),
    )
