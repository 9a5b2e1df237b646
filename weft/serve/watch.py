"""JobWatcher: wake the clients that wait for news of a job, and hold what is shown of jobs and ranks."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from weft.serve import messages
from weft.serve.batch import Batch
from weft.serve.dispatch import Dispatch
from weft.serve.jobs import Job, JsonObject

if TYPE_CHECKING:
    from weft.serve.engine import Engine

MAX_PREVIEWS = 256


@dataclass(frozen=True, kw_only=True)
class LiveJob:
    """What is known of a job that has not ended, beside what is stored."""

    queue_position: int | None = None
    eta: float | None = None
    ranks: tuple[int, ...] = ()
    plan: str | None = None
    preview: bytes | None = None
    preview_step: int = 0


class JobWatcher:
    """Written by the engine's thread, read by any; coroutines wait for changes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._previews: dict[str, tuple[int, bytes]] = {}
        self._live: dict[str, LiveJob] = {}
        self._running: list[JsonObject] = []
        self._work_seconds = 0.0
        self._timeline: messages.AttentionTimeline | None = None
        self._step: messages.StepDone | None = None

    def on_event(self, event: messages.EngineEvent) -> None:
        changed: tuple[str, ...] = ()
        match event:
            case messages.PreviewMade():
                changed = (event.job,)
                self._previews[event.job] = event.step, event.png
                while len(self._previews) > MAX_PREVIEWS:
                    del self._previews[next(iter(self._previews))]
            case messages.AttentionTimeline():
                self._timeline = event
            case messages.BatchProgress():
                changed, self._step = event.jobs, event.step
            case messages.JobStarted():
                changed = (event.job.id,)
            case messages.JobEnded():
                changed = (event.id,)
                self._previews.pop(event.id, None)
                self._live.pop(event.id, None)
        for id in changed:
            self.changed(id)

    def changed(self, id: str) -> None:
        """Wake the coroutines that wait for changes of a job."""
        with self._lock:
            waiting = list(self._waiting.get(id, ()))
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    async def changes(self, id: str, get: Callable[[str], Job | None]) -> AsyncGenerator[Job, None]:
        """Yield the job now and at each change, until it ends."""
        waiter = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiting.setdefault(id, set()).add(waiter)
        try:
            while (job := get(id)) is not None:
                yield job
                if not job.active:
                    return
                await waiter[1].wait()
                waiter[1].clear()
        finally:
            with self._lock:
                self._waiting[id].discard(waiter)
                if not self._waiting[id]:
                    del self._waiting[id]

    def live(self, id: str) -> LiveJob | None:
        live = self._live.get(id)
        step, preview = self._previews.get(id, (0, None))
        return live and replace(live, preview=preview, preview_step=step)

    def work_seconds(self) -> float:
        """Return the seconds that all ranks need for all jobs."""
        return self._work_seconds

    def publish(self, dispatch: Dispatch) -> None:
        """Update positions, estimates and running batches. Called by the engine's thread."""
        if dispatch.admission is None:
            return
        live: dict[str, LiveJob] = {}
        seconds = 0.0
        for batch in dispatch.batches.values():
            left = _seconds_left(dispatch, batch)
            seconds += left
            plan = batch.last_step.plan if batch.last_step else None
            live |= {id: LiveJob(eta=left, ranks=batch.ranks, plan=plan) for id in batch.jobs}
        order = sorted(dispatch.waiting.values(), key=lambda job: (-job.priority, job.deadline, job.id))
        alone = {shape: dispatch.latency.alone(shape) for shape in {job.params.shape for job in order}}
        for position, job in enumerate(order, start=1):
            seconds += alone[job.params.shape]
            live[job.id] = LiveJob(queue_position=position, eta=seconds)
        self._running = [_running(batch) for batch in dispatch.batches.values() if batch.ranks]
        self._live, self._work_seconds = live, seconds

    def snapshot(self, engine: Engine) -> JsonObject:
        """Return what `GET /v1/status` and the metrics show."""
        settings, world = engine.settings, engine.dispatch.world
        on = {rank: batch["batch"] for batch in self._running for rank in batch["ranks"]}
        waiting, step, timeline = engine.store.queued(), self._step, self._timeline
        return {
            "model": engine.name, "status": engine.status(), "world": world, "restarts": engine.restarts,
            "uptime": round(time.time() - engine.began, 1), "queue_limit": settings.queue,
            "queued": sum(waiting.values()), "waiting": waiting, "running": self._running,
            "imbalance": step and step.imbalance, "exposed": step and step.exposed,
            "timeline": timeline
            and {"label": timeline.label, "spans": [asdict(span) for span in timeline.spans]},
            "trouble": engine.trouble or None,
            "ranks": [_rank_status(engine, number, on.get(number)) for number in range(world)],
            "plan": engine.admission and engine.admission.latency.explain(engine.admission.default),
        }  # fmt: skip


def _seconds_left(dispatch: Dispatch, batch: Batch) -> float:
    ranks = len(batch.ranks) or dispatch.world
    # No steps are left while it is decoded, on one rank where a step may not fit.
    step = dispatch.latency.step(batch.shape, ranks, max(1, len(batch.jobs))) if batch.left else 0.0
    return batch.left * step + dispatch.latency.fixed(batch.shape)


def _running(batch: Batch) -> JsonObject:
    last = batch.last_step
    return {
        "batch": batch.id, "jobs": list(batch.jobs), "kind": batch.id.partition("_")[0], "step": batch.step,
        "steps": batch.shape.steps, "ranks": list(batch.ranks), "plan": last and last.plan,
        "seconds": last and last.seconds, "stopping": batch.stopping, "cancelled": not batch.jobs,
    }  # fmt: skip


def _rank_status(engine: Engine, number: int, job: str | None) -> JsonObject:
    rank = engine.ranks.all.get(number)
    beat = rank.beat if rank else messages.Beat()
    return {
        "rank": number, "host": rank.host if rank else None, "pid": rank.pid if rank else None,
        "alive": rank is not None and rank.facts is not None, "job": job,
        "load": round(min(1.0, beat.busy), 3), "memory": beat.memory, "limit": beat.limit,
    }  # fmt: skip
