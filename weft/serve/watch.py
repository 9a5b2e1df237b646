"""Watch: who waits for news of a job, and what there is to see of jobs and ranks right now."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from weft.serve.batch import Batch
from weft.serve.dispatch import Dispatch
from weft.serve.jobs import Job

if TYPE_CHECKING:
    from weft.serve.engine import Engine

MOST_PREVIEWS = 256


@dataclass(frozen=True, kw_only=True)
class Live:
    """Of a job that has not ended."""

    queue_position: int | None = None
    eta: float | None = None
    ranks: tuple[int, ...] = ()
    plan: str | None = None
    preview: bytes | None = None
    preview_step: int = 0


class Watch:
    """The engine's thread tells; any thread looks, and coroutines wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, set[tuple[asyncio.AbstractEventLoop, asyncio.Event]]] = {}
        self._previews: dict[str, tuple[int, bytes]] = {}
        self._live: dict[str, Live] = {}
        self._running: list[dict[str, Any]] = []
        self._behind = 0.0
        self._timeline: dict[str, Any] | None = None
        self._imbalance: float | None = None
        self._exposed: float | None = None

    def hear(self, what: str, id: str, said: dict[str, Any]) -> None:
        if what == "preview":
            self._previews[id] = (said["step"], said["png"])
            while len(self._previews) > MOST_PREVIEWS:
                del self._previews[next(iter(self._previews))]
        elif what == "timeline":
            self._timeline = {"label": said["label"], "spans": said["spans"]}
        elif what == "step":
            self._imbalance, self._exposed = said["imbalance"], said["exposed"]
        elif what == "job_ended":
            self._previews.pop(id, None)
            self._live.pop(id, None)
        for each in (id, *said.get("jobs", ())):
            self.changed(each)

    def changed(self, id: str) -> None:
        """Wake who waits for news of it."""
        with self._lock:
            waiting = list(self._waiting.get(id, ()))
        for loop, event in waiting:
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)

    async def changes(self, id: str, get: Callable[[str], Job | None]) -> AsyncIterator[Job]:
        """The job now and at each change; ends with it."""
        mine = (asyncio.get_running_loop(), asyncio.Event())
        with self._lock:
            self._waiting.setdefault(id, set()).add(mine)
        try:
            while (job := get(id)) is not None:
                yield job
                if not job.active:
                    return
                await mine[1].wait()
                mine[1].clear()
        finally:
            with self._lock:
                self._waiting[id].discard(mine)
                if not self._waiting[id]:
                    del self._waiting[id]

    def live(self, id: str) -> Live | None:
        found = self._live.get(id)
        step, preview = self._previews.get(id, (0, None))
        return found and replace(found, preview=preview, preview_step=step)

    def behind(self) -> float:
        """Seconds of work that wait, on all ranks."""
        return self._behind

    def publish(self, dispatch: Dispatch) -> None:
        """What is where, as the engine's thread knows it."""
        if dispatch.latency is None:
            return
        live, running, behind = {}, [], 0.0
        for batch in dispatch.batches.values():
            left = self._left(dispatch, batch)
            behind += left
            for id in batch.jobs:
                live[id] = Live(eta=left, ranks=batch.ranks, plan=batch.told.get("plan"))
            if batch.ranks:
                running.append(_shown(batch))
        order = sorted(dispatch.waiting.values(), key=lambda job: (-job.priority, job.deadline, job.id))
        alone = {shape: dispatch.latency.alone(shape) for shape in {job.asked.shape for job in order}}
        for place, job in enumerate(order, start=1):
            took = alone[job.asked.shape]
            live[job.id] = Live(queue_position=place, eta=behind + took)
            behind += took
        self._live, self._running, self._behind = live, running, behind

    @staticmethod
    def _left(dispatch: Dispatch, batch: Batch) -> float:
        assert dispatch.latency is not None
        ranks = len(batch.ranks) or dispatch.world
        # While it is decoded on one rank, where its steps may not fit, there are none left.
        left = batch.shape.steps - batch.step
        step = dispatch.latency.step(batch.shape, ranks, max(1, len(batch.jobs))) if left else 0.0
        return left * step + dispatch.latency.fixed(batch.shape)

    def snapshot(self, engine: Engine) -> dict[str, Any]:
        """All that the page and the metrics show."""
        settings, world = engine.settings, engine.dispatch.world
        on = {rank: batch["batch"] for batch in self._running for rank in batch["ranks"]}
        waiting = engine.store.queued()
        return {
            "model": engine.name, "status": engine.status(), "world": world, "restarts": engine.restarts,
            "uptime": round(time.time() - engine.began, 1), "queue_limit": settings.queue,
            "queued": sum(waiting.values()), "waiting": waiting, "running": self._running,
            "imbalance": self._imbalance, "exposed": self._exposed, "timeline": self._timeline,
            "trouble": engine.trouble or None,
            "ranks": [_rank(engine, number, on.get(number)) for number in range(world)],
            "plan": engine.admission and engine.admission.latency.explain(engine.admission.default),
        }  # fmt: skip


def _shown(batch: Batch) -> dict[str, Any]:
    return {
        "batch": batch.id, "jobs": list(batch.jobs), "kind": batch.id.partition("_")[0], "step": batch.step,
        "steps": batch.shape.steps, "ranks": list(batch.ranks), "plan": batch.told.get("plan"),
        "seconds": batch.told.get("seconds"), "stopping": batch.stopping, "cancelled": not batch.jobs,
    }  # fmt: skip


def _rank(engine: Engine, number: int, job: str | None) -> dict[str, Any]:
    rank = engine.ranks.all.get(number)
    said = rank.last if rank else {}
    return {
        "rank": number, "host": rank.host if rank else None, "pid": rank.pid if rank else None,
        "alive": bool(rank and rank.ready), "job": job, "load": round(min(1.0, said.get("busy", 0.0)), 3),
        "memory": said.get("memory", 0), "limit": said.get("limit", 0),
    }  # fmt: skip
