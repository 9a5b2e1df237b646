"""A stand-in for the engine: no ranks, no torch, real small files. `python -m tests.serve.fake --port 8123`.

It makes two jobs at a time, step by step in a thread, with previews that grow sharp.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import InputError
from weft.serve.api.app import create_app
from weft.serve.api.limits import RequestLimits
from weft.serve.api.server import server_config
from weft.serve.api_error import APIError
from weft.serve.disk import Disk
from weft.serve.job_store import JobStore, KeyReused
from weft.serve.jobs import MEDIA_TYPES, GenerationParams, Job, JobFailure
from weft.serve.messages import BatchProgress, EngineEvent, JobEnded, StepDone
from weft.serve.model_facts import ModelFacts
from weft.serve.reserve import DiskFull
from weft.serve.spool import SpoolFile
from weft.serve.watch import LiveJob

FACTS = ModelFacts(
    model="shapes", pipeline="VideoPipeline", kinds=("video", "image"), frames=16, height=64, width=64,
    multiple=(2, 8, 8), steps=20, guidance=2.0, fps=8.0, heads=6, head_dim=32, depth=8, width_model=192,
    patch=(2, 8, 8), text_tokens=16, params=5_000_000,
    takes=("prompt", "negative_prompt", "num_frames", "height", "width", "num_inference_steps",
           "guidance_scale", "image"),
)  # fmt: skip


class Fake:
    """What the routes see of an engine. `pace` is seconds for a step."""

    def __init__(
        self, folder: Path, *, pace: float = 0.0, limit: int = 64, world: int = 4, largest: int = 2**24
    ) -> None:
        self.facts: ModelFacts | None = FACTS
        self.trouble = ""
        self.name, self.state, self.pace, self.limit, self.world = "shapes", "ok", pace, limit, world
        self.largest = largest  # pixels of all frames
        self.store = JobStore(folder)
        self.disk = Disk(folder / "jobs", quota=2**33, reserve=self.store.reserve)
        self.on_event: list[Callable[[EngineEvent], None]] = []
        self._previews: dict[str, tuple[int, bytes]] = {}
        self._began, self._ended = time.time(), threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def drain(self, seconds: float) -> None:
        self.state = "draining"
        until = time.monotonic() + seconds
        while self.store.active() and time.monotonic() < until:
            time.sleep(0.01)

    def close(self) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self.store.close()

    def status(self) -> str:
        return self.state if self.facts or self.state != "ok" else "starting"

    def submit(
        self, params: GenerationParams, *, priority: int = 0, deadline: float | None = None,
        key: str | None = None, body: bytes = b"", image: SpoolFile | None = None, jobs: int = 1,  # noqa: ARG002
    ) -> Job:  # fmt: skip
        if len(self.store.active()) >= self.limit:
            raise APIError(429, "queue_full", f"{self.limit} jobs wait already. Try again later.", retry=3)
        if params.frames * params.height * params.width > self.largest:
            raise APIError(
                400, "out_of_memory", "That is too large for this server. Try fewer frames.", param="size"
            )
        name = "reference.png" if image else None
        try:
            job = self.store.create(
                replace(params, image=name), priority=priority, deadline=time.time() + (deadline or 60),
                key=key, body=body,
            )  # fmt: skip
        except KeyReused as error:
            raise APIError(409, "idempotency_key_reused", str(error), param="Idempotency-Key") from error
        if image:
            self.disk.move(job.id, "reference.png", image)
        return job

    def about(self) -> dict[str, Any]:
        return self.facts.to_json() if self.facts else {}

    def cancel(self, id: str) -> None:
        failed = self.store.fail(id, JobFailure(code="cancelled", message="It was cancelled."))
        if failed:
            self.emit(JobEnded(id, failed))

    def cancel_and_delete(self, id: str) -> bool:
        self.cancel(id)
        try:
            gone = self.store.delete(id)
        except DiskFull:
            self.disk.remove(id)
            gone = self.store.delete(id)
        self.disk.remove(id)
        return bool(gone)

    def live(self, id: str) -> LiveJob | None:
        job, active = self.store.get(id), self.store.active()
        if job is None or not job.active:
            return None
        waiting = [j.id for j in active if j.status == "queued"]
        place = waiting.index(id) + 1 if id in waiting else None
        step, preview = self._previews.get(id, (0, None))
        left = (job.params.steps - job.step) * max(self.pace, 0.001) * (1 + (place or 0) / 2)
        ranks = () if place else self._ranks(job, active)
        return LiveJob(
            queue_position=place, eta=left, ranks=ranks, plan=None if place else f"ulysses {len(ranks)}",
            preview=preview, preview_step=step,
        )  # fmt: skip

    async def changes(self, id: str) -> AsyncIterator[Job]:
        seen: Any = None
        while (job := self.store.get(id)) is not None:
            now = (job.status, job.step, self._previews.get(id, (0,))[0])
            if now != seen:
                seen = now
                yield job
                if not job.active:
                    return
            await asyncio.sleep(0.005)

    def content(self, id: str) -> tuple[Path, str] | None:
        job = self.store.get(id)
        if job is None or job.output is None:
            return None
        return self.disk.of(id) / job.output, MEDIA_TYPES[job.params.format]

    def explain(self, params: GenerationParams) -> dict[str, Any]:
        seconds = {str(ranks): round(params.steps * 0.4 / ranks, 3) for ranks in (1, 2, 4)}
        reason = "4 ranks: 6 heads do not divide by 4, rows do. 0.9 of the time of ulysses 2 ring 2."
        return {
            "plan": "ring 4",
            "ranks": 4,
            "seconds": seconds["4"],
            "seconds_by_ranks": seconds,
            "reason": reason,
        }

    def snapshot(self) -> dict[str, Any]:
        active = self.store.active()
        running = [job for job in active if job.status == "in_progress"]
        on = {rank: job.id for job in running for rank in self._ranks(job, active)}
        now = time.time()
        ranks = [
            {"rank": r, "host": "here", "pid": 1000 + r, "alive": True, "job": on.get(r),
             "load": round(0.75 + 0.2 * float(np.sin(now + r)), 3) if r in on else 0.0,
             "memory": 2**29 + (2**28 if r in on else 0), "limit": 2**31}
            for r in range(self.world)
        ]  # fmt: skip
        return {
            "model": self.name, "status": self.status(), "world": self.world, "restarts": 0,
            "uptime": round(now - self._began, 1), "ranks": ranks, "imbalance": 1.07, "exposed": 0.04,
            "queue_limit": self.limit, "queued": len(active) - len(running), "waiting": self.store.queued(),
            "running": [
                {"batch": job.id, "jobs": [job.id], "kind": job.params.kind, "step": job.step,
                 "steps": job.params.steps, "ranks": list(self._ranks(job, active)), "plan": "ring 2",
                 "seconds": self.pace}
                for job in running
            ],
            "timeline": {"label": "step 7, layer 3: ring of 4", "spans": timeline(self.world)},
            "plan": self.explain(running[0].params) if running else None,
        }  # fmt: skip

    def _ranks(self, job: Job, active: Sequence[Job]) -> tuple[int, ...]:
        running = [j.id for j in active if j.status == "in_progress"]
        share = self.world // max(1, len(running))
        first = running.index(job.id) * share if job.id in running else 0
        return tuple(range(first, first + share))

    def emit(self, event: EngineEvent) -> None:
        for on_event in self.on_event:
            on_event(event)

    def _work(self) -> None:
        while not self._ended.wait(max(self.pace, 0.002)):
            self.store.reserve.restore()
            active = self.store.active() if self.facts else []
            with suppress(DiskFull):  # tried again, as the engine does
                for job in [j for j in active if j.status == "queued"][: 2 - _running(active)]:
                    self.store.begin(job.id)
                for job in active:
                    if job.status == "in_progress":
                        self._step(job)

    def _step(self, job: Job) -> None:
        params = job.params
        # Without a pace twenty steps are enough to see, whatever was asked for.
        step = min(params.steps, job.step + (1 if self.pace else max(1, params.steps // 20)))
        if "fail" in params.prompt and step > 2:
            self._previews.pop(job.id, None)
            failed = self.store.fail(job.id, JobFailure(code="internal_error", message="It went wrong."))
            self.emit(JobEnded(job.id, failed))
        elif job.step < params.steps:
            self._previews[job.id] = step, preview(params, step)
            self.store.step(job.id, step, {"queue": 0.01, "encode": 0.01, "denoise": step * self.pace})
            message = StepDone(batch=job.id, step=step, seconds=self.pace, imbalance=1.07)
            self.emit(BatchProgress(message, (job.id,), self._ranks(job, [job])))
        else:
            made, name = media(params), "output." + params.format
            try:
                self.disk.write(job.id, name, made)
            except DiskFull:
                raise
            except InputError:
                pass  # it was deleted meanwhile
            self._previews.pop(job.id, None)
            timings = {**job.timings, "decode": 0.02}
            done = self.store.complete(job.id, name, len(made), timings, time.time() + 86400)
            if done:
                self.emit(JobEnded(job.id, done))


def _running(active: Sequence[Job]) -> int:
    return sum(job.status == "in_progress" for job in active)


def scene(params: GenerationParams, at: float) -> np.ndarray:
    """A disc that crosses a slope of two colours, uint8 [H, W, 3]."""
    dice = np.random.default_rng(params.seed)
    low, high, disc = dice.uniform(0, 255, (3, 3))
    y, x = np.mgrid[0 : params.height, 0 : params.width] / max(params.height, params.width)
    picture = low + (high - low) * (x + y)[..., None] / 2
    near = (x - 0.2 - 0.6 * at) ** 2 + (y - 0.5 * params.height / max(params.height, params.width)) ** 2
    picture[near < 0.02] = disc
    return picture.clip(0, 255).astype(np.uint8)


def preview(params: GenerationParams, step: int) -> bytes:
    from PIL import Image, ImageFilter

    left = 1 - step / params.steps
    noise = np.random.default_rng(step).uniform(0, 255, (params.height, params.width, 3))
    mixed = (1 - left) * scene(params, 0.5) + left * noise
    blurred = Image.fromarray(mixed.astype(np.uint8)).filter(ImageFilter.GaussianBlur(6 * left))
    return _file(blurred, "png")


def media(params: GenerationParams) -> bytes:
    from PIL import Image

    if params.format != "mp4":
        return _file(Image.fromarray(scene(params, 0.5)), params.format)
    import av

    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream: Any = file.add_stream("libx264", rate=round(params.fps))
        stream.width, stream.height, stream.pix_fmt = params.width, params.height, "yuv420p"
        for index in range(params.frames):
            frame = av.VideoFrame.from_ndarray(scene(params, index / params.frames), format="rgb24")
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return out.getvalue()


def _file(picture: Any, format: str) -> bytes:
    out = io.BytesIO()
    picture.save(out, format)
    return out.getvalue()


def timeline(world: int) -> list[dict[str, Any]]:
    """Spans of a ring: each rank computes a hop while the next keys travel."""
    spans, dice = [], np.random.default_rng(7)
    for rank in range(world):
        start = 0.0
        for hop in range(world):
            end = start + float(dice.uniform(8e-4, 1.2e-3))
            spans.append(
                {"rank": rank, "lane": "compute", "start": start, "end": end, "name": f"attend {hop}"}
            )
            if hop < world - 1:
                sent = start + float(dice.uniform(4e-4, 1.1e-3))
                spans.append(
                    {"rank": rank, "lane": "send", "start": start, "end": sent, "name": f"shift {hop}"}
                )
                if sent > end:
                    spans.append({"rank": rank, "lane": "wait", "start": end, "end": sent, "name": "wait"})
                end = max(end, sent)
            start = end
    return spans


@contextmanager
def made(folder: Path, **options: Any) -> Iterator[Fake]:
    engine = Fake(folder, **options)
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


@contextmanager
def serving(
    engine: Any, *, key: str | None = None, limits: RequestLimits | None = None, port: int = 0
) -> Iterator[str]:
    """The address of a real server, in a thread, by default on a free port."""
    import uvicorn

    app = create_app(engine, key=key, limits=limits or RequestLimits())
    config = server_config(app, host="127.0.0.1", port=port)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def main() -> None:
    import uvicorn

    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--port", type=int, default=8123)
    options.add_argument("--pace", type=float, default=0.25, help="seconds for a step")
    options.add_argument("--folder", type=Path, default=None)
    args = options.parse_args()
    with made(args.folder or Path(tempfile.mkdtemp()), pace=args.pace) as engine:
        app = create_app(engine, key=None, limits=RequestLimits())
        uvicorn.Server(server_config(app, host="127.0.0.1", port=args.port)).run()


if __name__ == "__main__":
    main()
