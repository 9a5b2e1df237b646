"""POST /v1/images/generations: make images for a client that waits, in one response or as events."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request, Response
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from weft.serve.api import schemas
from weft.serve.api.job_routes import b64, finished_job, idempotency_key, sse, wait_for, while_connected
from weft.serve.api.limits import RequestLimits
from weft.serve.api.middleware import open_stream
from weft.serve.api.openapi import error_responses, event_responses, request_body
from weft.serve.api.query import check_query
from weft.serve.api.request_body import body_parser
from weft.serve.api.resolve import resolve_image
from weft.serve.api_error import APIError
from weft.serve.jobs import Job, JsonObject

if TYPE_CHECKING:
    from weft.serve.engine import Engine

RESPONSES = {200: {"model": schemas.GenerationResponse, "content": event_responses()[200]["content"]}}
_log = logging.getLogger("weft.serve")


def routes(engine: Engine, limits: RequestLimits) -> APIRouter:
    router = APIRouter(prefix="/v1/images", tags=["images"], dependencies=[Depends(check_query)])
    parsed = Depends(body_parser(schemas.ImageRequest, limits, engine.disk))

    @router.post(
        "/generations", response_model=schemas.GenerationResponse,
        openapi_extra=request_body(schemas.ImageRequest),
        responses=RESPONSES | error_responses(400, 404, 408, 409, 413, 415, 429, 503),
    )  # fmt: skip
    async def generate(
        request: Request, body: schemas.ImageRequest = parsed
    ) -> schemas.GenerationResponse | Response:
        """Make `n` images of consecutive seeds. A client that disconnects before the end cancels them."""
        key = idempotency_key(request)
        if body.stream:
            open_stream(request)
        jobs = await run_in_threadpool(_submit, engine, body, key)
        headers = {"Cache-Control": "no-store", "X-Job-Id": ",".join(job.id for job in jobs)}
        if body.stream:
            stream = _stream(engine, jobs, partial_images=body.partial_images or 0, key=key)
            return EventSourceResponse(stream, headers=headers)
        try:
            jobs = await while_connected(request, asyncio.gather(*(wait_for(engine, job.id) for job in jobs)))
        finally:
            _cancel(engine, jobs, key)
        if body.response_format == "url":
            urls = [f"{request.base_url}v1/images/{job.id}/content" for job in jobs]
            data = [schemas.ImageData(url=url) for url in urls]
        else:
            data = [schemas.ImageData(b64_json=await run_in_threadpool(_read, engine, job)) for job in jobs]
        return schemas.GenerationResponse(
            created=int(time.time()), data=data, weft=[_info(job) for job in jobs], size=_size(jobs[0]),
            output_format=body.output_format or "png",
        )  # fmt: skip

    @router.post("/edits", include_in_schema=False)
    @router.post("/variations", include_in_schema=False)
    def unsupported() -> None:
        message = "This server does not edit images. POST /v1/images/generations makes new ones."
        raise APIError(404, "not_found", message)

    return router


def _submit(engine: Engine, body: schemas.ImageRequest, key: str | None) -> Sequence[Job]:
    """Submit all images or none."""
    params, count, jobs = resolve_image(body, engine), body.n or 1, []
    try:
        for index in range(count):
            job = engine.submit(
                replace(params, seed=params.seed + index), priority=body.priority or 0,
                deadline=body.deadline_seconds, key=key and f"{key}/{index}", body=body.fingerprint(),
                jobs=count,
            )  # fmt: skip
            jobs.append(job)
    except APIError:
        _cancel(engine, jobs, key)
        raise
    return jobs


def _cancel(engine: Engine, jobs: Sequence[Job], key: str | None) -> None:
    """Cancel jobs whose client is gone, unless it has an Idempotency-Key to come back with."""
    for job in jobs:
        if job.active and key is None:
            engine.cancel(job.id)


def _read(engine: Engine, job: Job) -> str:
    with suppress(OSError):
        if (stored := engine.content(job.id)) is not None:
            return b64(stored[0].read_bytes())
    raise APIError(409, "cancelled", "It was deleted before it could be sent.")


def _size(job: Job) -> str:
    return f"{job.params.width}x{job.params.height}"


def _info(job: Job) -> schemas.GenerationInfo:
    return schemas.GenerationInfo(id=job.id, seed=job.params.seed, timings=schemas.timings_of(job.timings))


async def _stream(
    engine: Engine, jobs: Sequence[Job], *, partial_images: int, key: str | None
) -> AsyncIterator[ServerSentEvent]:
    """Yield the events of all images as they come; an error ends the stream."""
    queue: asyncio.Queue[ServerSentEvent | APIError | None] = asyncio.Queue(maxsize=8)

    async def follow(job: Job) -> None:
        try:
            async for event in _image_events(engine, job, partial_images):
                await queue.put(event)
            await queue.put(None)
        except APIError as error:
            await queue.put(error)
        except Exception:
            _log.exception("a stream failed", extra={"job": job.id})
            await queue.put(APIError(500, "internal_error", "Internal error. The log of the server has it."))

    tasks, left = [asyncio.ensure_future(follow(job)) for job in jobs], len(jobs)
    try:
        while left:
            event = await queue.get()
            if isinstance(event, APIError):
                yield sse("error", json.dumps(event.body()))
                return
            left -= event is None
            if event is not None:
                yield event
    finally:
        for task in tasks:
            task.cancel()
        _cancel(engine, [job for each in jobs if (job := engine.store.get(each.id)) is not None], key)


async def _image_events(engine: Engine, job: Job, partial_images: int) -> AsyncIterator[ServerSentEvent]:
    """Yield up to so many previews, evenly over the steps, then the image."""
    count, last = 0, None
    common: JsonObject = {
        "created_at": int(job.created), "background": "opaque", "quality": "auto", "size": _size(job),
        "output_format": job.params.format,
    }  # fmt: skip
    async with aclosing(engine.changes(job.id)) as changes:
        async for now in changes:
            last, live = now, engine.live(job.id)
            if live is None or not live.preview or count == partial_images:
                continue
            if live.preview_step * (partial_images + 1) >= (count + 1) * job.params.steps:
                yield _event("image_generation.partial_image", common | {
                    "partial_image_index": count, "output_format": "png", "b64_json": b64(live.preview),
                    "weft": {"id": job.id, "step": live.preview_step, "num_steps": job.params.steps},
                })  # fmt: skip
                count += 1
    job = finished_job(last)
    details = {"image_tokens": 0, "text_tokens": 0}
    usage = {"input_tokens": 0, "output_tokens": 0, "total_tokens": 0, "input_tokens_details": details}
    image = {"b64_json": await run_in_threadpool(_read, engine, job), "usage": usage}
    yield _event("image_generation.completed", common | image | {"weft": _info(job).model_dump()})


def _event(name: str, fields: JsonObject) -> ServerSentEvent:
    return sse(name, json.dumps({"type": name, **fields}))
