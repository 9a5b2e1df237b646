"""StepProgress: the progress line of a running pipeline, and statistics of its steps."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, TextIO

from weft.core.timeline import exposed
from weft.core.units import clock
from weft.run.comm import Comm
from weft.run.measure.meter import Meter

if TYPE_CHECKING:
    from torch import Tensor

    from weft.generate.pretrained import Kwargs, PretrainedPipeline


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """One denoising step of all ranks."""

    seconds: float
    imbalance: float | None
    """Largest of the ranks' times in attention, over their mean; None without weft's attention."""
    exposed: float
    """Share of the time in which ranks waited for each other, on average."""


class StepProgress:
    """A pipeline's `callback_on_step_end`, on every rank; rank 0 may show a line."""

    def __init__(self, comm: Comm, meter: Meter, steps: int | None, stream: TextIO | None) -> None:
        self.comm, self.meter, self.steps, self.stream = comm, meter, steps, stream
        self.done: list[StepStats] = []
        self.began = time.monotonic()

    def __call__(
        self, pipe: PretrainedPipeline, _index: int, _timestep: Tensor | None, kwargs: Kwargs
    ) -> Kwargs:
        now = time.monotonic()
        self.done.append(_stats(self.comm.all_gather_ints(list(self.meter.take())), now - self.began))
        self.began = now
        if self.stream is not None:
            total = getattr(pipe, "num_timesteps", None) or self.steps or 0
            self._show(line(self.done, total), last=len(self.done) == total)
        return kwargs

    def summary(self) -> StepStats:
        """Average all steps but the first of several, in which plans are made and checked."""
        return _mean(self.done)

    def _show(self, text: str, *, last: bool) -> None:
        assert self.stream is not None
        if self.stream.isatty():
            print(f"\r{text}\x1b[K", end="\n" if last else "", file=self.stream, flush=True)
        else:
            print(text, file=self.stream, flush=True)


def line(done: list[StepStats], total: int) -> str:
    """Return the progress line after some steps, which fits 80 columns.

    The first step gives no estimate of the time left, since it includes planning and checks.
    """
    mean, last, left = _mean(done), done[-1], total - len(done)
    texts = [
        f"step {len(done)}/{total}" if total else f"step {len(done)}",
        f"{mean.seconds:.2f} s/step",
        *([f"{clock(mean.seconds * left)} left"] if left == 0 or (left > 0 and len(done) > 1) else []),
        *([] if last.imbalance is None else [f"imbalance {last.imbalance:.2f}"]),
        f"exposed {last.exposed:.1%}",
    ]
    return " · ".join(texts)


def _stats(spent: list[list[int]], seconds: float) -> StepStats:
    attention = [row[0] for row in spent]
    return StepStats(
        seconds=seconds,
        imbalance=max(attention) / fmean(attention) if any(attention) else None,
        exposed=exposed([row[1] / 1e9 for row in spent], seconds),
    )


def _mean(done: list[StepStats]) -> StepStats:
    steps = done[1:] or done
    imbalances = [step.imbalance for step in steps if step.imbalance is not None]
    return StepStats(
        seconds=fmean(step.seconds for step in steps),
        imbalance=fmean(imbalances) if imbalances else None,
        exposed=fmean(step.exposed for step in steps),
    )
