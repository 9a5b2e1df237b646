"""BatchExecutor: run some steps of a batch on some ranks, and send the server messages about them.

All its ranks run the same; the leader, the lowest of them, sends the messages. After each step they gather
what each has spent, and whether the server wants the leader to stop, so that all stop, or fail, together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from statistics import fmean

import torch

from weft.core.timeline import exposed
from weft.diffusers.explain import explain
from weft.generate.resume import PipelineState, StepInfo, run
from weft.run.comm import Comm
from weft.run.measure import trace
from weft.run.measure.meter import MeterTotals
from weft.serve.loaded_model import LoadedModel, pipeline_kwargs
from weft.serve.messages import AttentionTimeline, BatchFailed, BatchStopped, PreviewMade, RunBatch, StepDone
from weft.serve.preview import latents_png, video_png
from weft.serve.spans import Spans
from weft.serve.writer import Emit, ResultWriter

SAVE_SECONDS = 0.5
PREVIEW_SECONDS = 0.3
REPORT_SECONDS = 0.2
"""Shorter steps are reported together: each message costs the server a millisecond, which ranks lack."""
STOP, REFUSED, MEMORY = 1, 2, 3
"""The flag that a rank gathers after a step; 0: go on."""
FAILURES = {
    REFUSED: ("refused", "Another rank refuses this."),
    MEMORY: (
        "out_of_memory",
        "A rank ran out of memory. Ask for fewer frames, a smaller size or more ranks.",
    ),
}


class BatchExecutor:
    """One run of a batch. The leader calls `should_stop` after each step."""

    def __init__(
        self, model: LoadedModel, comm: Comm, writer: ResultWriter, emit: Emit,
        should_stop: Callable[[], bool], report_seconds: float | None = None,
    ) -> None:  # fmt: skip
        self.model, self.comm, self.writer, self.emit, self.should_stop = (
            model, comm, writer, emit, should_stop,
        )  # fmt: skip
        self.report_seconds = REPORT_SECONDS if report_seconds is None else report_seconds
        self.spans = Spans()
        self._saved = self._previewed = self._reported = time.monotonic()
        self._steps: list[tuple[float, list[list[int]]]] = []
        """Seconds, and what each rank spent, of steps that are not reported yet."""

    @property
    def leads(self) -> bool:
        return self.comm.rank == 0

    def run(self, batch: RunBatch) -> bool:
        """Run some steps; return False if they failed on all ranks alike. Other errors end the process."""
        try:
            kwargs = pipeline_kwargs(batch, self.model)
            start = PipelineState.from_bytes(batch.state) if batch.state else None
            torch.manual_seed(batch.jobs[0].seed)  # for what draws without a generator
            with trace.observed_by(self.spans):
                finished = run(
                    self.model.pipe, kwargs, start=start, on_step=lambda now: self._on_step(batch, now)
                )
        except Exception as error:
            self._fail(batch, error)
            return False
        timeline = self.spans.timeline(self.comm)
        if not self.leads:
            return True
        if timeline:
            label, spans = timeline
            self.emit(AttentionTimeline(batch=batch.batch, label=label, spans=spans))
        if finished is None:
            self.emit(BatchStopped(batch=batch.batch))
        else:
            self.writer.write(batch, finished, self.emit)
        return True

    def _on_step(self, batch: RunBatch, now: StepInfo) -> bool:
        """Return whether to stop here."""
        last = now.step == batch.jobs[0].steps
        rows = self._gather(*self.spans.take(), STOP * (self.leads and self.should_stop()))
        stops = rows[0][-1] == STOP and not last and now.can_stop
        if self.leads:
            clock = time.monotonic()
            self._steps.append((now.seconds, [row[:-1] for row in rows]))
            saves = stops or (now.can_stop and clock - self._saved > SAVE_SECONDS)
            if saves or last or clock - self._reported > self.report_seconds:
                self._report(batch, now, now.state().to_bytes() if saves else b"")
            self._saved = time.monotonic() if saves else self._saved
            if batch.previews and clock - self._previewed > PREVIEW_SECONDS:
                self._preview(batch, now)
        return stops

    def _report(self, batch: RunBatch, now: StepInfo, state: bytes) -> None:
        """Report the steps since the last report: their mean time, and what each rank spent on them."""
        steps, total = len(self._steps), sum(seconds for seconds, _ in self._steps)
        of_ranks = zip(*(rows for _, rows in self._steps), strict=True)
        spent = [MeterTotals(*map(sum, zip(*rows, strict=True))) for rows in of_ranks]
        self._steps, self._reported = [], time.monotonic()
        attend = tuple(rank.attending / 1e9 for rank in spent)
        self.emit(StepDone(
            batch=batch.batch, step=now.step, steps=steps, seconds=total / steps, attend=attend,
            imbalance=max(attend) / fmean(attend) if any(attend) else None,
            exposed=exposed([rank.waiting / 1e9 for rank in spent], total),
            plan=", ".join(self.spans.names(self.comm.size)) or "alone",
            sent=tuple(rank.sent for rank in spent), density=self.spans.density, gain=self._gain(),
            runs=spent[0].runs, first=spent[0].first, state=state,
        ))  # fmt: skip

    def _gain(self) -> float | None:
        pipe = self.model.pipe
        return explain(pipe, wait=False).gain if hasattr(pipe, "_weft") else None

    def _preview(self, batch: RunBatch, now: StepInfo) -> None:
        jobs = len(batch.ids)
        for at, (id, job) in enumerate(zip(batch.ids, batch.jobs, strict=True)):
            own = self.model.is_own
            png = video_png(now, at, jobs) if own else latents_png(now, at, job, self.model.facts)
            if png:
                self.emit(PreviewMade(batch=batch.batch, job=id, step=now.step, png=png))
        self._previewed = time.monotonic()

    def _gather(self, *numbers: int) -> list[list[int]]:
        """Gather the numbers of all ranks, of which the last is a flag; fail if a rank has failed."""
        rows = self.comm.all_gather_ints(list(numbers))
        if (worst := max(row[-1] for row in rows)) > STOP:
            raise _Failed(worst)
        return rows

    def _fail(self, batch: RunBatch, error: Exception) -> None:
        """Report an error that all ranks survive: they refuse the batch, or lack memory. Raise any other."""
        code = error.code if isinstance(error, _Failed) else _code(error)
        if not code:
            raise error
        if not isinstance(error, _Failed):
            with suppress(_Failed):
                self._gather(*MeterTotals(), code)
        name, text = FAILURES[code]
        if self.leads:
            message = text if isinstance(error, _Failed) or code == MEMORY else str(error)
            self.emit(BatchFailed(batch=batch.batch, code=name, message=message))


class _Failed(Exception):  # noqa: N818 - of this rank or another
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _code(error: Exception) -> int:
    """Return the code of an error that all ranks are expected to run into alike; 0 for any other."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
        return MEMORY
    return REFUSED if isinstance(error, ValueError | TypeError) else 0
