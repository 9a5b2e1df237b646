"""Engine: what the routes see. Jobs in, results out, whatever happens to the ranks in between.

    engine = Engine(Settings(model=…, folder=…, ranks=2)); engine.start()
    job = engine.submit(asked)
    async for job in engine.changes(job.id): …

Routes call it from any thread; one thread of its own turns events (of ranks, of clients, of the clock) into
commands.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.serve.admission import Admission
from weft.serve.disk import Disk
from weft.serve.dispatch import Dispatch
from weft.serve.errors import Refused, disk_full, without_paths
from weft.serve.jobs import TYPES, Asked, Failure, Job, Kind
from weft.serve.outcomes import Outcome
from weft.serve.ranks import Ranks
from weft.serve.reserve import DiskFull
from weft.serve.scheduler import POLICIES
from weft.serve.settings import Settings
from weft.serve.spool import SpoolFile
from weft.serve.store import KeyReused, Store
from weft.serve.watch import Live, Watch
from weft.serve.watchdog import overdue

log = logging.getLogger("weft.serve")
TICK = 0.5
STEPS = 0.1
"""Seconds after which steps alone are a reason to decide anew; what comes and ends is one at once."""
ROUTINE = ("step", "preview", "timeline")
STARTS = 3
"""How often a rank may end before it was ready until the server gives up."""
PICTURE = "reference.png"


class Engine:
    def __init__(self, settings: Settings) -> None:
        self.settings, self.name = settings, settings.name
        self.facts: dict[str, Any] | None = None
        self.restarts = 0
        self.on_event: list[Callable[[str, dict[str, Any]], None]] = []
        self.store = Store(settings.folder)
        self.disk = Disk(settings.folder / "jobs", quota=settings.quota, reserve=self.store.reserve)
        self.disk.sweep(self.store.get)
        self.events: queue.Queue[Any] = queue.Queue()
        self.ranks = Ranks(settings.world, settings.agent, self.events, settings.nodes)
        self.watch = Watch()
        self.dispatch = Dispatch(
            settings.world, POLICIES[settings.policy], self.store, self.disk, self.ranks.send, self._told,
            keep=settings.keep,
        )  # fmt: skip
        self._draining = self._ended = False
        self._blameless = ""
        """The reason of the last loss of ranks that no job is blamed for."""
        self.began = time.time()
        self._thread = threading.Thread(target=self._loop, name="weft-engine", daemon=True)

    def start(self) -> None:
        for job in self.store.active():
            self.dispatch.add(job)
        self.ranks.start()
        self._thread.start()

    def drain(self, seconds: float) -> None:
        """Take no new jobs; wait until those that run are done, or the time is over. Nothing is lost."""
        self._draining = True
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(
            batch.leader is not None and batch.jobs for batch in list(self.dispatch.batches.values())
        ):
            time.sleep(0.05)

    def close(self) -> None:
        self._ended = True
        self.events.put(("tick",))
        if self._thread.is_alive():
            self._thread.join()
        self.ranks.close()
        self.store.close()

    def status(self) -> str:
        if self._draining:
            return "draining"
        if self.ranks.failures >= STARTS:
            return "failed"
        return "ok" if self.facts and self.ranks.is_ready else "starting"

    @property
    def admission(self) -> Admission | None:
        """None until the model is loaded."""
        return self.dispatch.admission

    @property
    def trouble(self) -> str:
        """Why ranks are not ready, as far as they told and clients may know."""
        return self._public(self.ranks.trouble or self.ranks.refusal)

    def _public(self, text: str) -> str:
        return without_paths(text, self.settings.model, self.settings.folder)

    def submit(
        self, asked: Asked, *, priority: int = 0, deadline: float | None = None, key: str | None = None,
        body: bytes = b"", image: SpoolFile | None = None, jobs: int = 1,
    ) -> Job:  # fmt: skip
        """A queued job of a request for so many `jobs`, on the disk; or the earlier one of the same key."""
        if (admission := self.admission) is None:
            raise self._not_now()
        seconds = admission.allowed(asked.shape, deadline)
        asked = replace(asked, image=PICTURE if image else None)
        # Predicted now: the database is locked in `before`.
        refusals = {idle: admission.refusal(asked.shape, jobs=jobs, idle=idle) for idle in (False, True)}

        def before(id: str) -> None:  # not of a request that came before: that has its place
            self._admit(refusals)
            if image:
                self.disk.move(id, PICTURE, image)
                moved.append(id)

        moved: list[str] = []
        try:
            job = self.store.create(
                asked, priority=priority, deadline=time.time() + seconds, key=key, body=body, before=before
            )
        except KeyReused as error:
            raise Refused(409, "idempotency_key_reused", str(error), param="Idempotency-Key") from error
        except DiskFull as error:
            for id in moved:
                self.disk.remove(id)
            raise disk_full() from error
        self.events.put(("add", job))
        return job

    def job(self, id: str) -> Job | None:
        return self.store.get(id)

    def page(self, kind: Kind, limit: int, order: Any, after: str | None) -> tuple[Sequence[Job], bool]:
        return self.store.page(kind, limit=limit, order=order, after=after)

    def cancel(self, id: str) -> None:
        """It fails at once; its ranks are free at the end of the step, or replaced if that is far."""
        self._fail(id, Failure(code="cancelled", message="It was cancelled."))

    def _fail(self, id: str, failure: Failure) -> None:
        try:
            job = self.store.fail(id, failure, expires=time.time() + self.settings.keep)
        except DiskFull:  # held until the disk takes it
            self.events.put(("failed", id, failure))
            return
        if job is not None:
            self._told("job_ended", id, job=job)
            self.events.put(("drop", id))

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

    def live(self, id: str) -> Live | None:
        return self.watch.live(id)

    def changes(self, id: str) -> Any:
        return self.watch.changes(id, self.store.get)

    def content(self, id: str) -> tuple[Path, str] | None:
        job = self.store.get(id)
        if job is None or job.output is None:
            return None
        return self.disk.path(id, job.output), TYPES[job.asked.format]

    def explain(self, asked: Asked) -> dict[str, Any]:
        assert self.admission is not None
        return self.admission.explain(asked.shape)

    def about(self) -> dict[str, Any]:
        """What `GET /v1/models` tells of the model: its facts, and what this server admits."""
        return {**self.facts, **self.admission.to_json()} if self.facts and self.admission else {}

    def snapshot(self) -> dict[str, Any]:
        return self.watch.snapshot(self)

    def _admit(self, refusals: Mapping[bool, Refused | None]) -> None:
        """Refuse what has no place: in the queue, on the disk, in memory, in the time that there is."""
        if self._draining:
            raise self._not_now()
        waiting = (counts := self.store.counts())["queued"]
        if waiting >= self.settings.queue:
            retry = self.watch.behind() / max(1, self.settings.ranks)
            message = f"{waiting} jobs wait, and no more than {self.settings.queue} may. Try again later."
            raise Refused(429, "queue_full", message, retry=min(120.0, max(1.0, retry)))
        if self.disk.used() >= self.settings.quota:
            raise disk_full()
        if refused := refusals[not (waiting or counts["in_progress"])]:
            raise refused

    def _refuse_unfit(self, admission: Admission) -> None:
        """Fail jobs of the server before this one, which had more memory, other limits or more ranks."""
        changed = admission.differs_from(self.settings.folder)
        for task in self.dispatch.tasks():
            if refused := admission.refusal_of_task(task, changed=changed):
                for id in self.dispatch.batches[task.id].jobs if task.began else (task.id,):
                    self._fail(id, Failure(code=refused.code, message=refused.message))

    def _not_now(self) -> Refused:
        state = self.status()
        return Refused(503, state, f"The server is {state} and takes no jobs now. Try again later.")

    def _loop(self) -> None:
        looked = decided = 0.0
        while not self._ended:
            try:
                news, now = self._hear_all(), time.monotonic()
                if now - looked > TICK:
                    looked = now
                    self._look()
                if news or now - decided > STEPS:
                    decided = now
                    # On a full disk results would only pile up: what runs goes on, nothing is started.
                    if self.ranks.is_ready and not self._draining and not self.store.reserve.is_full:
                        self.dispatch.schedule()
                    self.watch.publish(self.dispatch)
            except DiskFull:
                continue  # the reserve has logged it
            except Exception:  # whatever it is, other jobs go on
                log.exception("An event could not be dealt with.")

    def _hear_all(self) -> bool:
        """Wait for an event; then all that came meanwhile. False if batches got on and that is all."""
        news, wait = False, TICK
        with suppress(queue.Empty):
            while True:
                what, *said = self.events.get(timeout=wait)
                self._hear(what, *said)
                news |= what != "rank" or said[1]["told"] not in ROUTINE
                wait = 0.0
        return news

    def _hear(self, what: str, *said: Any) -> None:
        if what == "add":
            self.dispatch.add(said[0])
        elif what == "drop":
            self.dispatch.drop(said[0])
        elif what == "failed":
            self.dispatch.drop(said[0])
            self.dispatch.outcomes.add(Outcome(*said))
        elif what == "rank":
            if said[1]["told"] == "failed":  # clients are told no path; the log has all of it
                log.warning("a batch failed", extra={"why": said[1]["message"]})
                said[1]["message"] = self._public(str(said[1]["message"]))
            self.dispatch.hear(*said[1:])
        elif what == "ready":
            if self.dispatch.latency is None:
                admission = Admission.of(self.settings, said[0], self.ranks.memory)
                self._refuse_unfit(admission)
                self.dispatch.admission, self.dispatch.latency = admission, admission.latency
            self.facts = said[0]  # from now on jobs are taken
        elif what == "lost":
            self.restarts += 1
            self.dispatch.lost(blamed=said[0] != self._blameless)
            self._told("restart", "", reason=said[0])

    def _look(self) -> None:
        """What only time brings: silent ranks, stuck or cancelled batches, room on the disk, expiry."""
        self.ranks.look()
        if self.store.reserve.check() or self.dispatch.outcomes:
            self.dispatch.outcomes.settle()
            self.store.reserve.restore(self.dispatch.outcomes.needed)
        if (found := overdue(self.dispatch)) is not None:
            self._blameless = self._blameless if found.blamed else found.reason
            self.ranks.kill(found.leader, found.reason)
        for job in self.store.expired(time.time()):
            self.cancel_and_delete(job.id)

    def _told(self, what: str, id: str, **said: Any) -> None:
        """To who watches a job, and to who counts; the end of one that was cancelled before was told then."""
        self.watch.hear(what, id, said)
        if what == "job_ended" and said["job"] is None:
            return
        for hear in self.on_event:
            hear(what, {"id": id, **said})
