"""Dispatch: turn the assignments of a policy into commands for ranks, and messages of ranks into job states.

A batch runs on some ranks until it is stopped, lost or done. Its last state is on the disk, so that it can
continue on any ranks. All of this runs in one thread, the engine's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from weft.core.errors import InputError
from weft.serve import messages
from weft.serve.admission import Admission
from weft.serve.api_error import is_out_of_descriptors
from weft.serve.assignment import Policy, RankAssignment
from weft.serve.batch import Batch
from weft.serve.disk import Disk, SavedState
from weft.serve.job_store import JobStore
from weft.serve.jobs import Job, JobFailure
from weft.serve.latency import Latency
from weft.serve.outcomes import JobOutcome, Outcomes
from weft.serve.reserve import DiskFull

log = logging.getLogger("weft.serve")
SHARED_TIMINGS = ("encode", "decode")
"""Timings that all jobs of a batch share; each writes a file of its own."""
Send = Callable[[Sequence[int], messages.ToRank], None]


class Dispatch:
    """The jobs that wait and the batches that began. `emit` receives the events of both."""

    def __init__(
        self, world: int, policy: Policy, store: JobStore, disk: Disk, send: Send,
        emit: Callable[[messages.EngineEvent], None], *, keep: float,
    ) -> None:  # fmt: skip
        self.world, self.policy, self.store, self.disk = world, policy, store, disk
        self.send, self.emit, self.keep = send, emit, keep
        self.admission: Admission | None = None
        """Once a model is loaded; nothing runs before."""
        self.waiting: dict[str, Job] = {}
        self.batches: dict[str, Batch] = {}
        self.outcomes = Outcomes(store, disk, emit, keep=keep)
        self.replaced: dict[str, float] = {}
        """Cancelled batches whose ranks were replaced, and when; see `weft.serve.watchdog`."""
        self._is_saving = True

    @property
    def latency(self) -> Latency:
        assert self.admission is not None
        return self.admission.latency

    def add(self, job: Job) -> None:
        """Add a job; one that an earlier server began continues from its last state."""
        if (
            job.id in self.outcomes
            or job.id in self.waiting
            or any(job.id in batch.jobs for batch in self.batches.values())
        ):
            return
        stored = self.store.get(job.id)
        if stored is None or not stored.active:
            return  # submitted again by its key, after it had ended
        saved = self.disk.state(job.id) if job.step else None
        if saved is None:
            self.waiting[job.id] = job
            return
        batch = self.batches.setdefault(saved.jobs[0], Batch.of([job], members=saved.jobs, step=saved.step))
        if job.id not in batch.jobs:
            batch.jobs.append(job.id)

    def drop(self, id: str) -> None:
        """Remove a job; a batch without jobs stops at the end of its step, or see `weft.serve.watchdog`."""
        self.waiting.pop(id, None)
        self.outcomes.drop(id)
        for batch in list(self.batches.values()):
            if id in batch.jobs:
                batch.jobs.remove(id)
                if not batch.jobs and not batch.ranks:
                    self._remove(batch)
                elif not batch.jobs:
                    batch.dropped = time.monotonic()
                    self._stop(batch)

    def schedulable(self) -> list[Batch]:
        """Return the batches that began and have steps left or are being decoded, and the waiting jobs."""
        begun = [batch for batch in self.batches.values() if batch.jobs and batch.writer is None]
        return begun + [Batch.of([job], began=False) for job in self.waiting.values()]

    def schedule(self) -> None:
        """Stop batches that are assigned other ranks, and start those whose ranks are free."""
        if self.admission is None:
            return
        assignments = self.policy(self.schedulable(), time.time(), self.world, self.admission)
        wanted = {each.batches[0]: each.ranks for each in assignments}
        busy: set[int] = set()
        for batch in self.batches.values():
            busy |= set(batch.ranks)
            if batch.ranks and wanted.get(batch.id) != batch.ranks:
                self._stop(batch)
            elif batch.stopping and batch.jobs:
                # If it has stopped by the time this arrives, it is started again.
                batch.stopping = False
                self.send(batch.ranks[:1], messages.ContinueBatch(batch=batch.id))
        for each in assignments:
            batch = self.batches.get(each.batches[0])
            if (batch is None or not batch.ranks) and busy.isdisjoint(each.ranks):
                busy |= set(each.ranks)
                self._start(batch or self._form(each), each.ranks)

    def on_message(self, message: messages.BatchMessage) -> None:
        """Handle a message of the leader of a batch."""
        batch = self.batches.get(message.batch)
        if batch is None or batch.leader is None:
            return  # its ranks were lost meanwhile: it continues from what was saved before
        batch.last_message = time.monotonic()
        match message:
            case messages.StepDone():
                self._on_step(batch, message)
            case messages.PreviewMade() | messages.AttentionTimeline():
                if isinstance(message, messages.AttentionTimeline) or message.job in batch.jobs:
                    self.emit(message)
            case messages.BatchDecoded():  # the leader writes the files beside its next batch
                batch.writer, batch.step = batch.leader, batch.shape.steps
                batch.ranks, batch.stopping = (), False
            case messages.BatchStopped():
                self._on_stopped(batch)
            case messages.ResultMade():
                self._on_result(batch, message)
            case messages.BatchDone():
                self._remove(batch)
            case messages.BatchFailed():
                self._fail(batch, JobFailure(code=message.code, message=message.message))

    def on_ranks_lost(self, *, blamed: bool = True) -> None:
        """Let what ran wait, at its last saved step; jobs that lost their ranks too often fail."""
        for batch in list(self.batches.values()):
            if batch.leader is None:
                continue
            batch.ranks, batch.writer, batch.stopping = (), None, False
            saved = self._saved(batch)
            batch.step = saved.step if saved else 0
            for id in list(batch.jobs):
                try:
                    job = self.store.lost(id, expires=time.time() + self.keep, blamed=blamed)
                except DiskFull:  # only the count of losses is lost
                    continue
                if job is None or not job.active:
                    batch.jobs.remove(id)
                    self.emit(messages.JobEnded(id, job))
            if not batch.jobs:
                self._remove(batch)

    def _form(self, assignment: RankAssignment) -> Batch:
        """Form a batch of the jobs that the model can make in one call with the first, in time."""
        first, *others = (self.waiting[id] for id in assignment.batches)
        alike = [job for job in others if not first.params.image and self._kind(job) == self._kind(first)]
        shape, admission, ranks = first.params.shape, self.admission, len(assignment.ranks)
        while alike and admission and admission.exceeds_step(shape, ranks, 1 + len(alike)):
            alike.pop()
        batch = Batch.of([self.waiting.pop(job.id) for job in (first, *alike)])
        self.batches[batch.id] = batch
        return batch

    def _kind(self, job: Job) -> list[object]:
        """Return what jobs of one batch have in common."""
        if not self.latency.facts.batches:
            return [job.id]
        names = ("kind", "image", *self.latency.facts.alike)
        return [getattr(job.params, name) for name in names]

    def _start(self, batch: Batch, ranks: Sequence[int]) -> None:
        batch.ranks, batch.stopping, batch.last_message = tuple(ranks), False, time.monotonic()
        try:
            jobs = self._begin(batch)
        except DiskFull:
            batch.ranks = ()
            return
        if not batch.jobs:
            self._remove(batch)
            return
        saved = self._saved(batch) if batch.step else None
        batch.step = saved.step if saved else 0  # from the start, if nothing was saved: the same result
        try:
            images = tuple(
                self.disk.read(job.id, job.params.image) if job.params.image else b"" for job in jobs
            )
        except OSError as error:  # deleted a moment ago, or lost by the disk
            if is_out_of_descriptors(error):
                batch.ranks = ()
            else:
                message = f"Its picture cannot be read: {error.strerror}."
                self._fail(batch, JobFailure(code="internal_error", message=message))
            return
        self.send(batch.ranks, messages.RunBatch(
            batch=batch.id, ids=tuple(job.id for job in jobs), jobs=tuple(job.params for job in jobs),
            ranks=batch.ranks, step=batch.step, previews=True, images=images,
            state=saved.data if saved else b"",
        ))  # fmt: skip
        for job in jobs:
            self.emit(messages.JobStarted(job))

    def _begin(self, batch: Batch) -> list[Job]:
        """Begin and return all members; if one was deleted, the others begin again without it."""
        for id in list(batch.jobs):
            job = self.store.get(id)
            if job is None or (job.status == "queued" and self.store.begin(id) is None):
                batch.jobs.remove(id)  # deleted a moment ago
        jobs = [self.store.get(id) for id in batch.members]
        if None in jobs:
            batch.members, batch.step = tuple(batch.jobs), 0
            jobs = [self.store.get(id) for id in batch.members]
        return [job for job in jobs if job is not None]

    def _stop(self, batch: Batch) -> None:
        if not batch.stopping:
            batch.stopping = True
            self.send(batch.ranks[:1], messages.StopBatch(batch=batch.id))

    def _on_step(self, batch: Batch, message: messages.StepDone) -> None:
        batch.step, batch.last_step = message.step, message
        if message.state:
            self._save(batch, message.state)
        ranks, jobs = len(batch.ranks), len(batch.members)  # also of jobs that were dropped
        self.latency.observe(batch.shape, ranks, jobs, message.seconds, steps=message.steps)
        with suppress(DiskFull):  # a later step writes as much
            for id in batch.jobs:
                self.store.step(id, batch.step, {})
        self.emit(messages.BatchProgress(message, tuple(batch.jobs), batch.ranks))

    def _on_stopped(self, batch: Batch) -> None:
        batch.ranks, batch.stopping = (), False
        if not batch.jobs:
            self._remove(batch)

    def _on_result(self, batch: Batch, message: messages.ResultMade) -> None:
        id, timings = message.job, message.timings
        if id not in batch.jobs:
            return  # deleted, or made before a loss
        shared = sum(timings.get(name, 0.0) for name in SHARED_TIMINGS) / len(batch.members)
        self.latency.observe_fixed(batch.shape, shared + timings.get("media", 0.0))
        self.outcomes.add(JobOutcome(id, name=message.name, data=message.data, timings=timings))
        batch.jobs.remove(id)  # not before: draining ends when no batch has jobs

    def _fail(self, batch: Batch, failure: JobFailure) -> None:
        for id in batch.jobs:
            self.outcomes.add(JobOutcome(id, failure))
        self._remove(batch)

    def _save(self, batch: Batch, state: bytes) -> None:
        """Save a state. If it cannot be written, that costs steps when ranks are lost, and nothing else."""
        try:
            self.disk.save_state(batch.members, step=batch.step, data=state)
        except InputError as error:
            if self._is_saving:
                log.warning("states are not saved", extra={"why": str(error)})
            self._is_saving = False
        else:
            self._is_saving = True

    def _saved(self, batch: Batch) -> SavedState | None:
        """Return the last state of the batch. One of other members, from before a save failed, is useless."""
        saved = self.disk.state(batch.jobs[0]) if batch.jobs else None
        return saved if saved and saved.jobs == batch.members else None

    def _remove(self, batch: Batch) -> None:
        del self.batches[batch.id]
        for id in batch.members:
            if id not in self.outcomes:
                self.disk.drop_state(id)
