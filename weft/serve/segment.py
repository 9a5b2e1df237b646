"""Segment: some steps of a batch on some ranks, until the server is told what came of it.

All its ranks run the same; the leader, the lowest of them, tells. After each step they gather what each has
spent and whether the leader was told to stop, so that all stop, or fail, together.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from statistics import fmean

import torch

from weft.models.explain import explain
from weft.models.resume import Moment, State, Stopped, run
from weft.run import trace
from weft.run.comm import Comm
from weft.run.meter import Spent
from weft.serve.preview import crude, own
from weft.serve.spans import Spans
from weft.serve.work import Model, Work
from weft.serve.writer import Tell, Writer

SAVE_SECONDS = 0.5
SHOW_SECONDS = 0.3
TELL_SECONDS = 0.2
"""Steps that are shorter are told of together: each word costs the server a millisecond, which ranks lack."""
STOP, REFUSED, MEMORY = 1, 2, 3
"""What a rank says after a step, if it says anything."""
FAILURES = {
    REFUSED: ("refused", "Another rank refuses this."),
    MEMORY: (
        "out_of_memory",
        "A rank ran out of memory. Ask for fewer frames, a smaller size or more ranks.",
    ),
}


class Segment:
    """One run of a `Work`; `asks_stop` is asked by the leader after each step."""

    def __init__(
        self, model: Model, comm: Comm, writer: Writer, tell: Tell, asks_stop: Callable[[], bool],
        pause: float | None = None,
    ) -> None:  # fmt: skip
        self.model, self.comm, self.writer, self.tell, self.asks_stop = model, comm, writer, tell, asks_stop
        self.pause = TELL_SECONDS if pause is None else pause
        self.spans = Spans()
        self._saved = self._shown = self._told = time.monotonic()
        self._steps: list[tuple[float, list[list[int]]]] = []
        """Seconds, and what each rank spent, of those that are not told of yet."""

    @property
    def leads(self) -> bool:
        return self.comm.rank == 0

    def run(self, work: Work) -> bool:
        """False if it failed on all ranks alike, who live on; a process dies of other errors."""
        try:
            given = work.given(self.model)
            start = State.from_bytes(work.state) if work.state else None
            torch.manual_seed(work.jobs[0].seed)  # for what draws without a generator
            with trace.watched_by(self.spans):
                ended = run(self.model.pipe, given, start=start, on_step=lambda now: self._stops(work, now))
        except Exception as error:
            self._fail(work, error)
            return False
        timeline = self.spans.timeline(self.comm)
        if not self.leads:
            return True
        if timeline:
            self.tell({"told": "timeline", "batch": work.batch, **timeline})
        if isinstance(ended, Stopped):
            said = {"told": "stopped", "batch": work.batch, "step": ended.state.step}
            self.tell(said, ended.state.to_bytes())
        else:
            about = {"ranks": self.comm.size, "plans": self.spans.names(self.comm.size)}
            self.writer.take(work, ended, about, self.tell)
        return True

    def _stops(self, work: Work, now: Moment) -> bool:
        rows = self._meet(*self.spans.take(), STOP * (self.leads and self.asks_stop()))
        stops = rows[0][-1] == STOP and now.step < work.jobs[0].steps
        if self.leads:
            clock = time.monotonic()
            self._steps.append((now.seconds, [row[:-1] for row in rows]))
            due = clock - self._saved > SAVE_SECONDS and not stops
            ends = stops or now.step == work.jobs[0].steps
            if due or ends or clock - self._told > self.pause:
                self._tell_steps(work, now, now.state().to_bytes() if due else b"")
            self._saved = time.monotonic() if due else self._saved
            if work.previews and clock - self._shown > SHOW_SECONDS:
                self._show(work, now)
        return stops

    def _tell_steps(self, work: Work, now: Moment, state: bytes) -> None:
        """Of the steps since this was last done: their mean time, and what ranks spent on all of them."""
        steps, total = len(self._steps), sum(seconds for seconds, _ in self._steps)
        of_ranks = zip(*(rows for _, rows in self._steps), strict=True)
        spent = [Spent(*map(sum, zip(*rows, strict=True))) for rows in of_ranks]
        self._steps, self._told = [], time.monotonic()
        attend = [rank.attending / 1e9 for rank in spent]
        waited = fmean(rank.waiting for rank in spent) / 1e9
        self.tell(
            {
                "told": "step", "batch": work.batch, "step": now.step,
                "steps": steps, "seconds": total / steps,
                "imbalance": max(attend) / fmean(attend) if any(attend) else None, "attend": attend,
                "exposed": min(1.0, waited / max(total, 1e-9)),
                "plan": ", ".join(self.spans.names(self.comm.size)) or "alone",
                "sent": [rank.sent for rank in spent], "density": self.spans.density, "gain": self._gain(),
                "runs": spent[0].runs, "first": spent[0].first,
            },
            state,
        )  # fmt: skip

    def _gain(self) -> float | None:
        pipe = self.model.pipe
        return explain(pipe, wait=False).gain if hasattr(pipe, "_weft") else None

    def _show(self, work: Work, now: Moment) -> None:
        for at, id in enumerate(work.ids):
            shown = work.jobs[at]
            picture = (
                own(now, at, len(work.ids)) if self.model.is_own else crude(now, at, shown, self.model.facts)
            )
            if picture:
                self.tell({"told": "preview", "batch": work.batch, "job": id, "step": now.step}, picture)
        self._shown = time.monotonic()

    def _meet(self, *numbers: int) -> list[list[int]]:
        """Everyone's numbers, a flag the last; who failed says so here, and the others fail with them."""
        rows = self.comm.gather_numbers(list(numbers))
        if (worst := max(row[-1] for row in rows)) > STOP:
            raise _Failed(worst)
        return rows

    def _fail(self, work: Work, error: Exception) -> None:
        """What all ranks refuse or lack, they survive."""
        code = error.code if isinstance(error, _Failed) else _code(error)
        if not code:
            raise error
        if not isinstance(error, _Failed):
            with suppress(_Failed):
                self._meet(*Spent(), code)
        name, text = FAILURES[code]
        if self.leads:
            message = text if isinstance(error, _Failed) or code == MEMORY else str(error)
            self.tell({"told": "failed", "batch": work.batch, "code": name, "message": message})


class _Failed(Exception):  # noqa: N818 - of this rank or another
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def _code(error: Exception) -> int:
    """What all ranks can be expected to run into alike; 0 for anything else."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate memory" in str(error):
        return MEMORY
    return REFUSED if isinstance(error, ValueError | TypeError) else 0
