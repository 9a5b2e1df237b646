"""Engine: what the HTTP routes use. Jobs in, results out, even if ranks are lost in between.

    engine = Engine(ServerSettings(model=…, folder=…, ranks=2)); engine.start()
    job = engine.submit(params)
    async for job in engine.changes(job.id): …

Routes call it from any thread. Its own thread turns events (of ranks, clients and the clock) into commands.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from weft.serve import messages
from weft.serve.admission import Admission
from weft.serve.api_error import APIError, disk_full, not_ready, without_paths
from weft.serve.disk import Disk
from weft.serve.dispatch import Dispatch
from weft.serve.job_store import JobStore, KeyReused
from weft.serve.jobs import MEDIA_TYPES, GenerationParams, Job, JobFailure, JsonObject
from weft.serve.messages import EngineEvent, JobEnded, RanksLost
from weft.serve.model_facts import ModelFacts
from weft.serve.outcomes import JobOutcome
from weft.serve.reserve import DiskFull
from weft.serve.scheduler import POLICIES
from weft.serve.settings import ServerSettings
from weft.serve.spool import SpoolFile
from weft.serve.supervisor import RanksEvent, RankSupervisor
from weft.serve.watch import JobWatcher, LiveJob
from weft.serve.watchdog import overdue

log = logging.getLogger("weft.serve")
CHECK_SECONDS = 0.5
STEP_SCHEDULE_SECONDS = 0.1
"""Least time between two schedules if only steps were made. Jobs that come or end are scheduled at once."""
MAX_START_FAILURES = 3
"""Failed starts of a rank until the server gives up."""
PROGRESS = (messages.StepDone, messages.PreviewMade, messages.AttentionTimeline)
REFERENCE_IMAGE = "reference.png"


class Engine:
    def __init__(self, settings: ServerSettings) -> None:
        self.settings, self.name = settings, settings.name
        self.facts: ModelFacts | None = None
        self.restarts = 0
        self.on_event: list[Callable[[EngineEvent], None]] = []
        self.store = JobStore(settings.folder)
        self.disk = Disk(settings.folder / "jobs", quota=settings.quota, reserve=self.store.reserve)
        self.disk.sweep(self.store.get)
        # Events of ranks, and calls that other threads leave to the engine's thread.
        self.events: queue.SimpleQueue[RanksEvent | Callable[[], None]] = queue.SimpleQueue()
        self.ranks = RankSupervisor(settings.world, settings.agent, self.events.put, settings.nodes)
        self.watch = JobWatcher()
        self.dispatch = Dispatch(
            settings.world, POLICIES[settings.policy], self.store, self.disk, self.ranks.send, self._emit,
            keep=settings.keep,
        )  # fmt: skip
        self._draining = self._closing = False
        self.began = time.time()
        self._thread = threading.Thread(target=self._loop, name="weft-engine", daemon=True)

    def start(self) -> None:
        for job in self.store.active():
            self.dispatch.add(job)
        self.ranks.start()
        self._thread.start()

    def drain(self, seconds: float) -> None:
        """Refuse new jobs, and wait until running ones are done or the time is over. No job is lost."""
        self._draining = True
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(
            batch.leader is not None and batch.jobs for batch in list(self.dispatch.batches.values())
        ):
            time.sleep(0.05)

    def close(self) -> None:
        self._closing = True
        self.events.put(lambda: None)  # wakes the thread
        if self._thread.is_alive():
            self._thread.join()
        self.ranks.close()
        self.store.close()

    def status(self) -> str:
        if self._draining:
            return "draining"
        if self.ranks.failures >= MAX_START_FAILURES:
            return "failed"
        return "ok" if self.facts and self.ranks.is_ready else "starting"

    @property
    def admission(self) -> Admission | None:
        return self.dispatch.admission

    @property
    def trouble(self) -> str:
        """Why ranks are not ready, without paths of the server."""
        return self._without_paths(self.ranks.trouble or self.ranks.refusal)

    def _without_paths(self, text: str) -> str:
        return without_paths(text, self.settings.model, self.settings.folder)

    def submit(
        self, params: GenerationParams, *, priority: int = 0, deadline: float | None = None,
        key: str | None = None, body: bytes = b"", image: SpoolFile | None = None, jobs: int = 1,
    ) -> Job:  # fmt: skip
        """Store and return a queued job of a request for so many `jobs`, or the earlier one of its key."""
        if (admission := self.admission) is None:
            raise not_ready(self.status())
        seconds = admission.allowed(params.shape, deadline)
        params = replace(params, image=REFERENCE_IMAGE if image else None)
        # Predicted now: the database is locked in `before`.
        refusals = {idle: admission.refusal(params.shape, jobs=jobs, idle=idle) for idle in (False, True)}

        def before(id: str) -> None:  # not called for an earlier job: that was admitted before
            self._admit(refusals)
            if image:
                self.disk.move(id, REFERENCE_IMAGE, image)
                moved.append(id)

        moved: list[str] = []
        try:
            job = self.store.create(
                params, priority=priority, deadline=time.time() + seconds, key=key, body=body, before=before
            )
        except KeyReused as error:
            raise APIError(409, "idempotency_key_reused", str(error), param="Idempotency-Key") from error
        except DiskFull as error:
            for id in moved:
                self.disk.remove(id)
            raise disk_full() from error
        self.events.put(partial(self.dispatch.add, job))
        return job

    def cancel(self, id: str) -> None:
        """Fail a job at once. Its ranks are free at the end of their step, or replaced if that is far."""
        self._fail(id, JobFailure(code="cancelled", message="It was cancelled."))

    def _fail(self, id: str, failure: JobFailure) -> None:
        try:
            job = self.store.fail(id, failure, expires=time.time() + self.settings.keep)
        except DiskFull:  # held until the disk takes it
            self.events.put(partial(self._hold_failure, id, failure))
            return
        if job is not None:
            self._emit(JobEnded(id, job))
            self.events.put(partial(self.dispatch.drop, id))

    def _hold_failure(self, id: str, failure: JobFailure) -> None:
        self.dispatch.drop(id)
        self.dispatch.outcomes.add(JobOutcome(id, failure))

    def cancel_and_delete(self, id: str) -> bool:
        self.cancel(id)
        try:
            gone = self.store.delete(id)
        except DiskFull:
            self.disk.remove(id)  # the room of its files is enough for the database
            gone = self.store.delete(id)
        if gone is not None:
            self.disk.remove(id)
            self.watch.changed(id)
        return gone is not None

    def live(self, id: str) -> LiveJob | None:
        return self.watch.live(id)

    def changes(self, id: str) -> AsyncGenerator[Job, None]:
        return self.watch.changes(id, self.store.get)

    def content(self, id: str) -> tuple[Path, str] | None:
        job = self.store.get(id)
        if job is None or job.output is None:
            return None
        return self.disk.path(id, job.output), MEDIA_TYPES[job.params.format]

    def explain(self, params: GenerationParams) -> JsonObject:
        assert self.admission is not None
        return self.admission.explain(params.shape)

    def about(self) -> JsonObject:
        """Return what `GET /v1/models` shows of the model: its facts, and what this server admits."""
        return {**self.facts.to_json(), **self.admission.to_json()} if self.facts and self.admission else {}

    def snapshot(self) -> JsonObject:
        return self.watch.snapshot(self)

    def _admit(self, refusals: Mapping[bool, APIError | None]) -> None:
        """Refuse a job for which the queue, the disk, the memory or the time limits have no room."""
        if self._draining:
            raise not_ready(self.status())
        waiting = (counts := self.store.counts())["queued"]
        if waiting >= self.settings.queue:
            retry = self.watch.work_seconds() / max(1, self.settings.ranks)
            message = f"{waiting} jobs wait, and no more than {self.settings.queue} may. Try again later."
            raise APIError(429, "queue_full", message, retry=min(120.0, max(1.0, retry)))
        if self.disk.used() >= self.settings.quota:
            raise disk_full()
        if refused := refusals[not (waiting or counts["in_progress"])]:
            raise refused

    def _refuse_unfit(self, admission: Admission) -> None:
        """Fail jobs that an earlier server admitted with more memory, other limits or more ranks."""
        changed = admission.differs_from(self.settings.folder)
        for batch in self.dispatch.schedulable():
            if refused := admission.refusal_of_batch(batch, changed=changed):
                for id in batch.jobs:
                    self._fail(id, JobFailure(code=refused.code, message=refused.message))

    def _loop(self) -> None:
        checked = scheduled = 0.0
        while not self._closing:
            try:
                is_urgent, now = self._handle_events(), time.monotonic()
                if now - checked > CHECK_SECONDS:
                    checked = now
                    self._check()
                if is_urgent or now - scheduled > STEP_SCHEDULE_SECONDS:
                    scheduled = now
                    # On a full disk results would only pile up: start nothing.
                    if self.ranks.is_ready and not self._draining and not self.store.reserve.is_full:
                        self.dispatch.schedule()
                    self.watch.publish(self.dispatch)
            except DiskFull:
                continue  # the reserve has logged it
            except Exception:  # other jobs go on
                log.exception("An event could not be dealt with.")

    def _handle_events(self) -> bool:
        """Wait for events and handle them. Return whether any but `PROGRESS` was among them."""
        is_urgent, wait = False, CHECK_SECONDS
        with suppress(queue.Empty):
            while True:
                event = self.events.get(timeout=wait)
                is_urgent |= not isinstance(event, PROGRESS)
                self._handle(event)
                wait = 0.0
        return is_urgent

    def _handle(self, event: RanksEvent | Callable[[], None]) -> None:
        if isinstance(event, messages.Ready):
            if self.admission is None:
                admission = Admission.of(self.settings, event.facts, self.ranks.memory)
                self._refuse_unfit(admission)
                self.dispatch.admission = admission
            self.facts = event.facts  # jobs are accepted from now on
        elif isinstance(event, RanksLost):
            self.restarts += 1
            self.dispatch.on_ranks_lost(blamed=event.blamed)
            self._emit(event)
        elif callable(event):
            event()
        else:
            if isinstance(event, messages.BatchFailed):  # the log has all of it, clients get no paths
                log.warning("a batch failed", extra={"why": event.message})
                event = replace(event, message=self._without_paths(event.message))
            self.dispatch.on_message(event)

    def _check(self) -> None:
        """Handle what only time brings: silent ranks, stuck batches, room on the disk, expiry."""
        self.ranks.check()
        if self.store.reserve.check() or self.dispatch.outcomes:
            self.dispatch.outcomes.settle()
            self.store.reserve.restore(self.dispatch.outcomes.needed)
        if (late := overdue(self.dispatch)) is not None:
            self.ranks.kill(late.leader, late.reason, blamed=late.blamed)
        for job in self.store.expired(time.time()):
            self.cancel_and_delete(job.id)

    def _emit(self, event: EngineEvent) -> None:
        """Notify watchers of jobs and subscribers. The end of a cancelled job was an event before."""
        self.watch.on_event(event)
        if not isinstance(event, JobEnded) or event.job is not None:
            for on_event in self.on_event:
                on_event(event)
