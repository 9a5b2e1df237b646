"""Routes of jobs, the same for videos and images: list, retrieve, delete, content and events."""

# Not `from __future__ import annotations`: FastAPI reads annotations that depend on the kind.
import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi import Path as PathParam
from fastapi.responses import FileResponse
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from weft.serve.api import schemas
from weft.serve.api.middleware import open_stream
from weft.serve.api.openapi import error_responses, event_responses, file_responses
from weft.serve.api.query import check_query
from weft.serve.api.variants import VARIANTS, variant_of
from weft.serve.api_error import APIError
from weft.serve.jobs import Job, Kind

if TYPE_CHECKING:
    from weft.serve.engine import Engine

FAILURE_STATUSES = {
    "refused": 400, "out_of_memory": 400, "too_long": 400, "cancelled": 409, "rank_lost": 503,
    "disk_full": 503,
}  # fmt: skip
"""Statuses of failed jobs, for clients that wait for a result; other failures are 500."""
POLL = {"openai-poll-after-ms": "500"}
JobId = Annotated[str, PathParam(description="As in the response that created the job.")]
T = TypeVar("T")


def routes(engine: "Engine", kind: Kind) -> APIRouter:
    router = APIRouter(prefix=f"/v1/{kind}s", tags=[f"{kind}s"], dependencies=[Depends(check_query)])
    is_video = kind == "video"
    response_model = schemas.VideoResponse if is_video else schemas.ImageResponse
    list_model = schemas.VideoList if is_video else schemas.ImageList
    variants = Literal["video", "thumbnail", "spritesheet"] if is_video else Literal["image", "thumbnail"]

    @router.get("", response_model=list_model, responses=error_responses(400))
    def list_jobs(
        limit: Annotated[int, Query(ge=1, le=100), schemas.PLAIN_NUMBER] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(pattern=rf"^{kind}_[0-7][0-9A-HJKMNP-TV-Z]{{25}}$")] = None,
    ) -> schemas.ListResponse:
        """List the jobs of this kind, the newest first; `after` is the last id of the page before."""
        jobs, has_more = engine.store.page(kind, limit=limit, order=order, after=after)
        ids = [job.id for job in jobs] or [None]
        data = [schemas.job_response(job, engine.live(job.id)) for job in jobs]
        return list_model(data=data, first_id=ids[0], last_id=ids[-1], has_more=has_more)  # type: ignore[arg-type]

    @router.get("/{id}", response_model=response_model, responses=error_responses(404))
    def retrieve(id: JobId, response: Response) -> schemas.JobResponse:
        """Return the job as it is now."""
        job = find_job(engine, kind, id)
        if job.active:
            response.headers.update(POLL)
        return schemas.job_response(job, engine.live(id))

    @router.delete("/{id}", response_model=schemas.DeletedResponse, responses=error_responses(404))
    def delete(id: JobId) -> schemas.DeletedResponse:
        """Cancel the job if it has not ended, and delete all of its files."""
        find_job(engine, kind, id)
        if not engine.cancel_and_delete(id):
            raise _not_found(kind)
        return schemas.DeletedResponse(id=id, object="video.deleted" if is_video else "image.deleted")

    content_errors = error_responses(400, 404, 409, 416)

    @router.get("/{id}/content", response_class=Response, responses=file_responses(kind) | content_errors)
    @router.head("/{id}/content", include_in_schema=False)
    async def content(id: JobId, request: Request, variant: variants = kind) -> Response:  # type: ignore[valid-type]
        """Return the file. Range and If-None-Match are supported."""
        job = await run_in_threadpool(find_job, engine, kind, id)
        return await content_response(engine, job, request, variant)

    stream_responses = event_responses() | error_responses(404)

    @router.get("/{id}/events", response_class=EventSourceResponse, responses=stream_responses)
    async def stream_events(id: JobId, request: Request) -> EventSourceResponse:
        """Stream `progress` with the job at each change, `preview` with a PNG, and `done` with the job."""
        open_stream(request)
        await run_in_threadpool(find_job, engine, kind, id)
        return EventSourceResponse(_events(engine, id), headers={"Cache-Control": "no-store"})

    return router


def find_job(engine: "Engine", kind: Kind, id: str) -> Job:
    job = engine.store.get(id)
    if job is None or job.params.kind != kind:
        raise _not_found(kind)
    return job


def _not_found(kind: Kind) -> APIError:
    message = f"No {kind} has this id; it may be deleted or expired. GET /v1/{kind}s lists all."
    return APIError(404, "not_found", message, param="id")


async def content_response(
    engine: "Engine", job: Job, request: Request, variant: str, **headers: str
) -> Response:
    """Return the file of a completed job, or a variant of it."""
    kind = job.params.kind
    if job.active:
        message = f"The {kind} is {job.status} ({job.progress} %). Retry when its status is completed."
        raise APIError(409, f"{kind}_not_ready", message, param="id")
    if job.failure is not None:
        message = f"The {kind} failed and has no content: {job.failure.message}"
        raise APIError(404, "not_found", message, param="id")
    stored = await run_in_threadpool(engine.content, job.id)
    if stored is None:
        raise _not_found(kind)
    path, media_type = stored
    name = f"{job.id}{'' if variant == kind else '_' + variant}"
    try:
        if variant in VARIANTS:
            picture, media_type = await run_in_threadpool(variant_of, path, variant), "image/webp"
            if isinstance(picture, bytes):
                return Response(
                    picture, media_type=media_type, headers={"Cache-Control": "no-store", **headers}
                )
            path = picture
        return _file_response(request, path, media_type, name + path.suffix, headers)
    except FileNotFoundError:  # deleted meanwhile
        raise _not_found(kind) from None


def _file_response(
    request: Request, path: Path, media_type: str, name: str, headers: dict[str, str]
) -> Response:
    headers = {"Cache-Control": "private, max-age=3600", **headers}
    response = FileResponse(
        path, media_type=media_type, filename=name, headers=headers, stat_result=path.stat(),
        content_disposition_type="inline",
    )  # fmt: skip
    tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if response.headers["etag"] in tags or "*" in tags:
        return Response(status_code=304, headers={"ETag": response.headers["etag"], **headers})
    if not request.headers.get("range", "bytes=").strip().lower().startswith("bytes="):
        # RFC 9110, 14.2: a range of an unknown unit is ignored.
        request.scope["headers"] = [(k, v) for k, v in request.scope["headers"] if k != b"range"]
    return response


async def _events(engine: "Engine", id: str) -> AsyncIterator[ServerSentEvent]:
    preview_step, job = 0, None
    async with aclosing(engine.changes(id)) as changes:
        async for job in changes:
            live = engine.live(id)
            yield sse("progress", schemas.job_response(job, live).model_dump_json())
            if live is not None and live.preview and live.preview_step > preview_step:
                preview_step = live.preview_step
                yield sse("preview", json.dumps({"step": preview_step, "b64_json": b64(live.preview)}))
    if job is not None:
        yield sse("done", schemas.job_response(job, None).model_dump_json())


def sse(name: str, data: str) -> ServerSentEvent:
    return ServerSentEvent(data, event=name, sep="\n")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def wait_for(engine: "Engine", id: str) -> Job:
    """Return the job when it has ended; raises if it has no result."""
    job = None
    async with aclosing(engine.changes(id)) as changes:
        async for now in changes:
            job = now
    return finished_job(job)


def finished_job(job: Job | None) -> Job:
    if job is None or job.active:
        raise APIError(409, "cancelled", "It was deleted before it was done.")
    if job.failure is None:
        return job
    raise APIError(FAILURE_STATUSES.get(job.failure.code, 500), job.failure.code, job.failure.message)


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`, which is cancelled when the client disconnects."""
    task, disconnect = asyncio.ensure_future(work), asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, disconnect}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError(499, "client_gone", "The client disconnected.")
        return task.result()
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
        message = f"Idempotency-Key must be 1 to 255 printable ASCII characters, got {len(key)}."
        raise APIError(400, "invalid_idempotency_key", message, param="Idempotency-Key")
    return key
