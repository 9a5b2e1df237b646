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
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.core.topology import Topology
from weft.serve.disk import Disk, DiskFull
from weft.serve.dispatch import Dispatch
from weft.serve.errors import Refused
from weft.serve.jobs import TYPES, Asked, Failure, Job, Kind, Shape
from weft.serve.latency import Latency
from weft.serve.ranks import Ranks
from weft.serve.scheduler import POLICIES
from weft.serve.settings import Settings
from weft.serve.store import KeyReused, Store
from weft.serve.watch import Live, Watch

log = logging.getLogger("weft.serve")
TICK = 0.5
STEPS = 0.1
"""Seconds after which steps alone are a reason to decide anew; what comes and ends is one at once."""
ROUTINE = ("step", "preview", "timeline")
TIMES_ALONE = 3.0
"""A job should take no longer than so many times what it takes alone, unless it says."""
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
        self.disk = Disk(settings.folder / "jobs", quota=settings.quota)
        self.disk.sweep(self.store.get)
        self.events: queue.Queue[Any] = queue.Queue()
        world = settings.ranks * settings.nodes
        self.ranks = Ranks(world, settings.orders, self.events, settings.token)
        self.watch = Watch()
        self.dispatch = Dispatch(
            world, POLICIES[settings.policy], self.store, self.disk, self.ranks.send, self._told,
            keep=settings.keep,
        )  # fmt: skip
        self._draining = self._ended = False
        self.began = time.time()
        self._thread = threading.Thread(target=self._loop, name="weft-engine", daemon=True)

    def start(self) -> None:
        for job in self.store.active():
            self.dispatch.add(job)
        self.ranks.start(self.settings.host, self.settings.port)
        self._thread.start()

    def drain(self, seconds: float) -> None:
        """Take no new jobs; wait until those that run are done, or the time is over. Nothing is lost."""
        self._draining = True
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(
            batch.leader is not None for batch in list(self.dispatch.batches.values())
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
    def trouble(self) -> str:
        """Why ranks are not ready, as far as they told."""
        return self.ranks.trouble

    def submit(
        self, asked: Asked, *, priority: int = 0, deadline: float | None = None, key: str | None = None,
        body: bytes = b"", image: bytes | None = None,
    ) -> Job:  # fmt: skip
        """A queued job, on the disk; or the earlier one of the same key."""
        if (latency := self.dispatch.latency) is None:
            raise self._not_now()
        seconds = TIMES_ALONE * latency.alone(asked.shape) if deadline is None else deadline
        asked = replace(asked, image=PICTURE if image else None)

        def before(id: str) -> None:  # not of a request that came before: that has its place
            self._admit(asked, latency)
            if image:
                self.disk.write(id, PICTURE, image)

        try:
            job = self.store.create(
                asked, priority=priority, deadline=time.time() + seconds, key=key, body=body, before=before
            )
        except KeyReused as error:
            raise Refused(409, "idempotency_key_reused", str(error), param="Idempotency-Key") from error
        except (DiskFull, sqlite3.OperationalError) as error:
            raise self._full() from error
        self.events.put(("add", job))
        return job

    def job(self, id: str) -> Job | None:
        return self.store.get(id)

    def page(self, kind: Kind, limit: int, order: Any, after: str | None) -> tuple[Sequence[Job], bool]:
        return self.store.page(kind, limit=limit, order=order, after=after)

    def cancel(self, id: str) -> None:
        """It fails at once; its ranks are free at the end of the step."""
        self._fail(id, Failure(code="cancelled", message="It was cancelled."))

    def _fail(self, id: str, failure: Failure) -> None:
        job = self.store.fail(id, failure, expires=time.time() + self.settings.keep)
        if job is not None:
            self._told("job_ended", id, job=job)
            self.events.put(("drop", id))

    def cancel_and_delete(self, id: str) -> bool:
        self.cancel(id)
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
        assert self.dispatch.latency is not None
        return self.dispatch.latency.explain(asked.shape)

    def usual_plan(self) -> dict[str, Any] | None:
        """Of what is made when nothing is said of sizes."""
        if self.facts is None or self.dispatch.latency is None:
            return None
        said = {name: self.facts[name] for name in ("frames", "height", "width", "steps")}
        guided = (self.facts["guidance"] or 0) > 1
        return self.dispatch.latency.explain(Shape(**said, guided=guided))

    def snapshot(self) -> dict[str, Any]:
        return self.watch.snapshot(self)

    def _admit(self, asked: Asked, latency: Latency) -> None:
        """Refuse what has no place: in the queue, on the disk, in memory."""
        if self._draining:
            raise self._not_now()
        waiting = self.store.counts()["queued"]
        if waiting >= self.settings.queue:
            retry = self.watch.behind() / max(1, self.settings.ranks)
            message = f"{waiting} jobs wait, and no more than {self.settings.queue} may. Try again later."
            raise Refused(429, "queue_full", message, retry=min(120.0, max(1.0, retry)))
        if self.disk.used() >= self.settings.quota:
            raise self._full()
        if message := latency.no_room(asked.shape):
            raise Refused(400, "out_of_memory", message, param="size")

    def _refuse_unfit(self, latency: Latency) -> None:
        """Jobs that another server took, which had more memory: they would wait for ever."""
        for task in self.dispatch.tasks():
            if message := latency.no_room(task.shape, task.jobs):
                for id in self.dispatch.batches[task.id].jobs if task.began else (task.id,):
                    self._fail(id, Failure(code="out_of_memory", message=message))

    def _not_now(self) -> Refused:
        state = self.status()
        return Refused(503, state, f"The server is {state} and takes no jobs now. Try again later.")

    @staticmethod
    def _full() -> Refused:
        message = "The disk space for results is used up. Delete some, or try again when they expire."
        return Refused(503, "disk_full", message, retry=60)

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
                    if self.ranks.is_ready and not self._draining:
                        self.dispatch.schedule()
                    self.watch.publish(self.dispatch)
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
        elif what == "rank":
            self.dispatch.hear(*said[1:])
        elif what == "ready":
            if self.dispatch.latency is None:
                topology = replace(Topology.local(self.settings.ranks), machines=self.settings.nodes)
                mask, limit = self.settings.options.get("mask"), self.ranks.memory
                latency = Latency(said[0], topology, mask=mask, limit=limit)
                for pace in said[0].get("paces", ()):  # what warming up took
                    latency.observe(Shape(**pace["shape"]), pace["ranks"], 1, pace["seconds"])
                self._refuse_unfit(latency)
                self.dispatch.latency = latency
            self.facts = said[0]  # from now on jobs are taken
        elif what == "lost":
            self.restarts += 1
            self.dispatch.lost()
            self._told("restart", "", reason=said[0])

    def _look(self) -> None:
        """What only time brings: silent ranks, stuck batches, results that expire."""
        self.ranks.look()
        if (stuck := self.dispatch.stuck()) is not None:
            self.ranks.kill(stuck[0], f"batch {stuck[1]} made no step")
        for job in self.store.expired(time.time()):
            self.cancel_and_delete(job.id)

    def _told(self, what: str, id: str, **said: Any) -> None:
        """To who watches a job, and to who counts; the end of one that was cancelled before was told then."""
        self.watch.hear(what, id, said)
        if what == "job_ended" and said["job"] is None:
            return
        for hear in self.on_event:
            hear(what, {"id": id, **said})
