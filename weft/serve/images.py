"""POST /v1/images/generations: pictures that the client waits for, as one answer or as events."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from weft.serve import fit, results, wire
from weft.serve.document import body, errors, events
from weft.serve.errors import Refused
from weft.serve.jobs import Job
from weft.serve.limits import Limits
from weft.serve.middleware import open_stream
from weft.serve.uploads import Posted, posted

MADE = {200: {"model": wire.Generated, "content": events()[200]["content"]}}


def routes(engine: Any, limits: Limits) -> APIRouter:
    router = APIRouter(prefix="/v1/images", tags=["images"])
    asks = Annotated[Posted[wire.ImageAsks], Depends(posted(wire.ImageAsks, limits, engine.disk))]

    @router.post(
        "/generations", response_model=wire.Generated, openapi_extra=body(wire.ImageAsks),
        responses=MADE | errors(400, 404, 408, 409, 413, 415, 429, 503),
    )  # fmt: skip
    async def generate(post: asks, request: Request) -> Any:  # type: ignore[valid-type]
        """Makes `n` pictures, of seeds that follow each other. Who goes away before the end cancels them."""
        key = results.idempotency(request)
        if post.asks.stream:
            open_stream(request)
        jobs = await run_in_threadpool(_submitted, engine, post, key)
        headers = {"Cache-Control": "no-store", "X-Job-Id": ",".join(job.id for job in jobs)}
        if post.asks.stream:
            stream = _stream(engine, post.asks, jobs, kept=key is not None)
            return EventSourceResponse(stream, headers=headers)
        try:
            ends = asyncio.gather(*(results.ended(engine, job.id) for job in jobs))
            jobs = await results.while_there(request, ends)
        finally:
            _cancel(engine, jobs, kept=key is not None)
        here = str(request.base_url) if post.asks.response_format == "url" else None
        data = [await _picture(engine, job, here) for job in jobs]
        return wire.Generated(
            created=int(time.time()), data=data, weft=[_about(job) for job in jobs], **_form(jobs[0])
        )

    @router.post("/edits", include_in_schema=False)
    @router.post("/variations", include_in_schema=False)
    def absent() -> None:
        message = "This server does not edit images. POST /v1/images/generations makes new ones."
        raise Refused(404, "not_found", message)

    return router


def _submitted(engine: Any, post: Posted[wire.ImageAsks], key: str | None) -> list[Job]:
    """All of them or none."""
    asks, asked, jobs = post.asks, fit.image(post.asks, engine), []
    try:
        for index in range(asks.n or 1):
            jobs.append(
                engine.submit(
                    replace(asked, seed=asked.seed + index), priority=asks.priority or 0,
                    deadline=asks.deadline_seconds, key=key and f"{key}/{index}", body=post.canonical,
                    jobs=asks.n or 1,
                )
            )  # fmt: skip
    except Refused:
        _cancel(engine, jobs, kept=key is not None)
        raise
    return jobs


def _cancel(engine: Any, jobs: Sequence[Job], *, kept: bool) -> None:
    """What nobody waits for; with an Idempotency-Key somebody may come back for it."""
    for job in jobs:
        if job.active and not kept:
            engine.cancel(job.id)


async def _picture(engine: Any, job: Job, here: str | None) -> wire.Picture:
    if here is not None:
        return wire.Picture(url=f"{here}v1/images/{job.id}/content")
    return wire.Picture(b64_json=await run_in_threadpool(_read, engine, job))


def _read(engine: Any, job: Job) -> str:
    try:
        path, _ = engine.content(job.id) or (Path(), "")
        return results.b64(path.read_bytes())
    except OSError:
        raise Refused(409, "cancelled", "It was deleted before it could be sent.") from None


def _form(job: Job) -> dict[str, Any]:
    return {"output_format": job.asked.format, "size": f"{job.asked.width}x{job.asked.height}"}


def _about(job: Job) -> wire.Generation:
    return wire.Generation(id=job.id, seed=job.asked.seed, timings=wire.times(job.timings))


async def _stream(
    engine: Any, asks: wire.ImageAsks, jobs: Sequence[Job], *, kept: bool
) -> AsyncIterator[ServerSentEvent]:
    """The events of all pictures as they come; an error ends the stream."""
    queue: asyncio.Queue[ServerSentEvent | Refused | None] = asyncio.Queue(maxsize=8)

    async def follow(job: Job) -> None:
        try:
            async for event in _partial(engine, job, asks.partial_images or 0):
                await queue.put(event)
            await queue.put(None)
        except Refused as refused:
            await queue.put(refused)
        except Exception as error:
            await queue.put(
                Refused(500, "internal_error", "Something went wrong here. The log of the server has it.")
            )
            raise error

    tasks, left = [asyncio.ensure_future(follow(job)) for job in jobs], len(jobs)
    try:
        while left:
            event = await queue.get()
            if isinstance(event, Refused):
                yield results.event("error", json.dumps(event.body()))
                return
            left -= event is None
            if event is not None:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        _cancel(engine, [engine.job(job.id) or replace(job, status="failed") for job in jobs], kept=kept)


async def _partial(engine: Any, job: Job, wanted: int) -> AsyncIterator[ServerSentEvent]:
    """Up to so many previews, evenly over the steps, then the picture."""
    sent, last = 0, None
    rest = {"created_at": int(job.created), "background": "opaque", "quality": "auto", **_form(job)}
    async with aclosing(engine.changes(job.id)) as changes:
        async for now in changes:
            last, live = now, engine.live(job.id)
            if live is None or not live.preview or sent == wanted:
                continue
            if live.preview_step * (wanted + 1) >= (sent + 1) * job.asked.steps:
                more = {
                    "partial_image_index": sent,
                    "output_format": "png",
                    "b64_json": results.b64(live.preview),
                }
                about = {"id": job.id, "step": live.preview_step, "num_steps": job.asked.steps}
                yield _event("image_generation.partial_image", {**rest, **more, "weft": about})
                sent += 1
    job = results.with_result(last)
    data = await run_in_threadpool(_read, engine, job)
    usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0}
    usage["input_tokens_details"] = {"image_tokens": 0, "text_tokens": 0}  # type: ignore[assignment]
    yield _event(
        "image_generation.completed",
        {**rest, "b64_json": data, "usage": usage, "weft": _about(job).model_dump()},
    )


def _event(name: str, said: dict[str, Any]) -> ServerSentEvent:
    return results.event(name, json.dumps({"type": name, **said}))
