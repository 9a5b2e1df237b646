"""Dispatch: turns what a policy wants into commands for ranks, and what ranks tell into the state of jobs.

A batch runs on some ranks until it is stopped, lost or done; its last state is on the disk, so it can go on
anywhere. One thread, the engine's, owns all of this.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from weft.core.errors import InputError
from weft.serve.admission import Admission
from weft.serve.batch import Batch
from weft.serve.disk import Disk, State
from weft.serve.errors import is_out_of_files
from weft.serve.jobs import Failure, Job
from weft.serve.latency import Latency
from weft.serve.outcomes import Outcome, Outcomes
from weft.serve.reserve import DiskFull
from weft.serve.store import Store
from weft.serve.tasks import Grant, Policy, Task

log = logging.getLogger("weft.serve")
OF_BATCH = ("encode", "decode")
"""Timings that all jobs of a batch share; each has a file of its own."""


class Send(Protocol):
    def __call__(self, number: int, said: dict[str, Any], blob: bytes = b"") -> None: ...


class Dispatch:
    """`tell` hears of each change: (what, job id or batch id, details)."""

    def __init__(
        self, world: int, policy: Policy, store: Store, disk: Disk, send: Send, tell: Callable[..., None],
        *, keep: float,
    ) -> None:  # fmt: skip
        self.world, self.policy, self.store, self.disk = world, policy, store, disk
        self.send, self.tell, self.keep = send, tell, keep
        self.latency: Latency | None = None
        self.admission: Admission | None = None
        self.waiting: dict[str, Job] = {}
        self.batches: dict[str, Batch] = {}
        self.outcomes = Outcomes(store, disk, tell, keep=keep)
        self.replaced: dict[str, float] = {}
        """Cancelled batches whose ranks were replaced, and when; see `weft.serve.watchdog`."""
        self._is_saving = True

    def add(self, job: Job) -> None:
        """A job to make; one that a server before us began goes on where it was."""
        if (
            job.id in self.outcomes
            or job.id in self.waiting
            or any(job.id in batch.jobs for batch in self.batches.values())
        ):
            return
        known = self.store.get(job.id)
        if known is None or not known.active:
            return  # asked for again by its key, when it had ended
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
                    self._forget(batch)
                elif not batch.jobs:
                    batch.dropped = time.monotonic()
                    self._stop(batch)

    def tasks(self) -> list[Task]:
        waiting = [
            Task(id=job.id, shape=job.asked.shape, left=job.asked.steps, arrived=job.created,
                 deadline=job.deadline, priority=job.priority)
            for job in self.waiting.values()
        ]  # fmt: skip
        begun = [batch for batch in self.batches.values() if batch.jobs and batch.writer is None]
        return [batch.task() for batch in begun] + waiting

    def schedule(self) -> None:
        """Stop what should be elsewhere, start what has its ranks free; the rest comes when they are."""
        if self.latency is None:
            return
        runs = self.policy(self.tasks(), time.time(), self.world, self.admission or self.latency)
        wanted = {run.tasks[0]: run.ranks for run in runs}
        busy: set[int] = set()
        for batch in self.batches.values():
            busy |= set(batch.ranks)
            if batch.ranks and wanted.get(batch.id) != batch.ranks:
                self._stop(batch)
            elif batch.stopping and batch.jobs:
                self._go_on(batch)
        for run in runs:
            known = self.batches.get(run.tasks[0])
            if (known is None or not known.ranks) and busy.isdisjoint(run.ranks):
                busy |= set(run.ranks)
                self._start(known or self._gather(run), run.ranks)

    def hear(self, said: dict[str, Any], blob: bytes) -> None:
        """What the leader of a batch told."""
        batch = self.batches.get(str(said.get("batch")))
        if batch is None or batch.leader is None:
            return  # its ranks were lost meanwhile: it goes on from what was saved before
        batch.sign = time.monotonic()
        hears = {
            "step": self._step, "preview": self._preview, "timeline": self._timeline, "made": self._made,
            "decoded": self._decoded, "stopped": self._stopped, "done": self._done, "failed": self._failed,
        }  # fmt: skip
        hears[said["told"]](batch, said, blob)

    def lost(self, *, blamed: bool = True) -> None:
        """All ranks are gone: what ran waits, at the step that was saved last; or has failed too often.

        Jobs are not `blamed` for ranks that the server itself has replaced.
        """
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
                    self.tell("job_ended", id, job=job)
            if not batch.jobs:
                self._forget(batch)

    def _gather(self, run: Grant) -> Batch:
        """Those that the model can make in one call with the first, in time; others come next time."""
        first = self.waiting[run.tasks[0]]
        rest = [self.waiting[id] for id in run.tasks[1:]]
        together = [job for job in rest if not first.asked.image and self._kind(job) == self._kind(first)]
        shape, bound = first.asked.shape, self.admission
        while together and bound and bound.exceeds_step(shape, len(run.ranks), 1 + len(together)):
            together.pop()
        batch = Batch.of([self.waiting.pop(job.id) for job in (first, *together)])
        self.batches[batch.id] = batch
        return batch

    def _kind(self, job: Job) -> list[Any]:
        assert self.latency is not None
        if not self.latency.facts.get("batches", True):
            return [job.id]
        names = ("kind", "image", *self.latency.facts.get("alike", ()))
        return [getattr(job.asked, name) for name in names]

    def _start(self, batch: Batch, ranks: Sequence[int]) -> None:
        batch.ranks, batch.stopping, batch.sign = tuple(ranks), False, time.monotonic()
        try:
            jobs = self._jobs(batch)
        except DiskFull:
            batch.ranks = ()
            return
        if not batch.jobs:
            self._forget(batch)
            return
        saved = self._saved(batch) if batch.step else None
        batch.step = saved.step if saved else 0  # from the start, if nothing was saved: the same result
        try:
            pictures = [self.disk.read(job.id, job.asked.image) if job.asked.image else b"" for job in jobs]
        except OSError as error:  # it was deleted a moment ago, or the disk has lost it
            if is_out_of_files(error):
                batch.ranks = ()
                return
            message = f"Its picture cannot be read: {error.strerror}."
            self._failed(batch, {"code": "internal_error", "message": message}, b"")
            return
        said = {
            "do": "run", "batch": batch.id, "ranks": list(ranks), "step": batch.step, "preview": True,
            "jobs": [{**job.asked.to_json(), "id": job.id} for job in jobs],
            "images": [len(picture) for picture in pictures],
        }  # fmt: skip
        blob = b"".join(pictures) + (saved.data if saved else b"")
        for number in ranks:
            self.send(number, said, blob)
        for job in jobs:
            self.tell("began", job.id, job=job, ranks=tuple(ranks))

    def _jobs(self, batch: Batch) -> list[Job]:
        """All members, begun; of a batch of which one was deleted the others, from the start."""
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
            self.send(batch.ranks[0], {"do": "stop", "batch": batch.id})

    def _go_on(self, batch: Batch) -> None:
        """It was to be stopped, but has not; if it has meanwhile, it is started again."""
        batch.stopping = False
        self.send(batch.ranks[0], {"do": "go", "batch": batch.id})

    def _step(self, batch: Batch, said: dict[str, Any], blob: bytes) -> None:
        batch.step, batch.told = int(said["step"]), said
        if blob:
            self._save(batch, batch.step, blob)
        if self.latency is not None:
            jobs, steps = len(batch.members), int(said.get("steps", 1))  # also of jobs that were dropped
            self.latency.observe(batch.shape, len(batch.ranks), jobs, said["seconds"], steps=steps)
        with suppress(DiskFull):  # a later step tells as much
            for id in batch.jobs:
                self.store.step(id, batch.step, {})
        about = {name: value for name, value in said.items() if name not in ("told", "batch")}
        self.tell("step", batch.id, jobs=tuple(batch.jobs), ranks=batch.ranks, **about)

    def _preview(self, batch: Batch, said: dict[str, Any], blob: bytes) -> None:
        if said["job"] in batch.jobs:
            self.tell("preview", said["job"], step=said["step"], png=blob)

    def _timeline(self, batch: Batch, said: dict[str, Any], blob: bytes) -> None:  # noqa: ARG002
        self.tell("timeline", batch.id, label=said["label"], spans=said["spans"])

    def _decoded(self, batch: Batch, said: dict[str, Any], blob: bytes) -> None:  # noqa: ARG002
        """Only its files are left, which the leader writes beside whatever comes next."""
        batch.writer, batch.step = batch.leader, batch.shape.steps
        batch.ranks, batch.stopping = (), False

    def _stopped(self, batch: Batch, said: dict[str, Any], blob: bytes) -> None:
        batch.step, batch.ranks, batch.stopping = int(said["step"]), (), False
        if not batch.jobs:
            self._forget(batch)
        elif blob:
            self._save(batch, batch.step, blob)

    def _made(self, batch: Batch, said: dict[str, Any], blob: bytes) -> None:
        id = said["job"]
        if id not in batch.jobs:
            return  # deleted, or made before a loss
        if self.latency is not None:
            took = said["timings"]
            shared = sum(took.get(name, 0.0) for name in OF_BATCH) / len(batch.members)
            self.latency.observe_fixed(batch.shape, shared + took.get("media", 0.0))
        about = said.get("about", {})
        self.outcomes.add(Outcome(id, name=said["name"], data=blob, timings=said["timings"], about=about))
        batch.jobs.remove(id)  # not before: draining ends when no batch has jobs

    def _done(self, batch: Batch, said: dict[str, Any], blob: bytes) -> None:  # noqa: ARG002
        self._forget(batch)

    def _failed(self, batch: Batch, said: dict[str, Any], blob: bytes) -> None:  # noqa: ARG002
        failure = Failure(code=str(said["code"]), message=str(said["message"]))
        for id in batch.jobs:
            self.outcomes.add(Outcome(id, failure))
        self._forget(batch)

    def _save(self, batch: Batch, step: int, blob: bytes) -> None:
        """A state that cannot be written costs steps if the ranks are lost, and nothing else."""
        try:
            self.disk.save_state(batch.members, step=step, data=blob)
        except InputError as error:
            if self._is_saving:
                log.warning("states are not saved", extra={"why": str(error)})
            self._is_saving = False
        else:
            self._is_saving = True

    def _saved(self, batch: Batch) -> State | None:
        """The last state of the batch; one of other members, from before a save failed, is of no use."""
        saved = self.disk.state(batch.jobs[0]) if batch.jobs else None
        return saved if saved and saved.jobs == batch.members else None

    def _forget(self, batch: Batch) -> None:
        del self.batches[batch.id]
        for id in batch.members:
            if id not in self.outcomes:
                self.disk.drop_state(id)
