"""Results: what can be done with a job that was made, the same for videos and images."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Query, Request, Response
from fastapi import Path as InPath
from fastapi.responses import FileResponse
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool

from weft.serve import wire
from weft.serve.document import errors, events, files
from weft.serve.errors import Refused
from weft.serve.jobs import Job, Kind
from weft.serve.middleware import open_stream
from weft.serve.variants import VARIANTS, variant_of

STATUSES = {
    "refused": 400, "out_of_memory": 400, "too_long": 400, "cancelled": 409, "rank_lost": 503,
    "disk_full": 503,
}  # fmt: skip
"""Of failures, for who waits for a result; others are faults of ours."""
POLL = {"openai-poll-after-ms": "500"}
Id = Annotated[str, InPath(description="As the answer that made it has it.")]
T = TypeVar("T")


def routes(engine: Any, kind: Kind) -> APIRouter:
    router = APIRouter(prefix=f"/v1/{kind}s", tags=[f"{kind}s"])
    one, many = (wire.Video, wire.Videos) if kind == "video" else (wire.Image, wire.Images)
    variants = (
        Literal["video", "thumbnail", "spritesheet"] if kind == "video" else Literal["image", "thumbnail"]
    )

    @router.get("", response_model=many, responses=errors(400))
    def list_jobs(
        limit: Annotated[int, Query(ge=1, le=100), wire.PLAIN] = 20,
        order: Literal["asc", "desc"] = "desc",
        after: Annotated[str | None, Query(pattern=rf"^{kind}_[0-7][0-9A-HJKMNP-TV-Z]{{25}}$")] = None,
    ) -> Any:
        """The jobs of this kind, the newest first; `after` is the last id of the page before."""
        jobs, more = engine.page(kind, limit, order, after)
        ids = [job.id for job in jobs] or [None]
        data = [wire.made(job, engine.live(job.id)) for job in jobs]
        return many(data=data, first_id=ids[0], last_id=ids[-1], has_more=more)  # type: ignore[arg-type]

    @router.get("/{id}", response_model=one, responses=errors(404))
    def retrieve(id: Id, response: Response) -> Any:
        """The job as it is now."""
        job = found(engine, kind, id)
        if job.active:
            response.headers.update(POLL)
        return wire.made(job, engine.live(id))

    @router.delete("/{id}", response_model=wire.Deleted, responses=errors(404))
    def delete(id: Id) -> Any:
        """Cancels it if it has not ended, and deletes all that there is of it."""
        found(engine, kind, id)
        if not engine.cancel_and_delete(id):
            raise _missing(kind)
        return wire.Deleted(id=id, object=f"{kind}.deleted")  # type: ignore[arg-type]

    @router.get("/{id}/content", response_class=Response, responses=files(kind) | errors(400, 404, 409, 416))
    @router.head("/{id}/content", include_in_schema=False)
    async def content(id: Id, request: Request, variant: variants = kind) -> Response:  # type: ignore[valid-type]
        """The file. Takes Range and If-None-Match."""
        job = await run_in_threadpool(found, engine, kind, id)
        return await sent(engine, job, request, variant)

    @router.get("/{id}/events", response_class=EventSourceResponse, responses=events() | errors(404))
    async def watch(id: Id, request: Request) -> EventSourceResponse:
        """`progress` with the job whenever it moves, `preview` with a PNG, at last `done` with the job."""
        open_stream(request)
        await run_in_threadpool(found, engine, kind, id)
        return EventSourceResponse(_events(engine, id), headers={"Cache-Control": "no-store"})

    return router


def found(engine: Any, kind: Kind, id: str) -> Job:
    job = engine.job(id)
    if job is None or job.asked.kind != kind:
        raise _missing(kind)
    return job


def _missing(kind: Kind) -> Refused:
    message = (
        f"There is no {kind} of this id; it may have been deleted or expired. GET /v1/{kind}s lists them."
    )
    return Refused(404, "not_found", message, param="id")


async def sent(engine: Any, job: Job, request: Request, variant: str, **headers: str) -> Response:
    """The file of a job that is completed."""
    kind = job.asked.kind
    if job.active:
        message = f"The {kind} is {job.status} ({job.progress} %). Ask again when its status is completed."
        raise Refused(409, f"{kind}_not_ready", message, param="id")
    if job.failure is not None:
        message = f"The {kind} failed and has no content: {job.failure.message}"
        raise Refused(404, "not_found", message, param="id")
    there = await run_in_threadpool(engine.content, job.id)
    if there is None:
        raise _missing(kind)
    path, sort = there
    name = f"{job.id}{'' if variant == kind else '_' + variant}"
    try:
        if variant in VARIANTS:
            picture, sort = await run_in_threadpool(variant_of, path, variant), "image/webp"
            if isinstance(picture, bytes):
                return Response(picture, media_type=sort, headers={"Cache-Control": "no-store", **headers})
            path = picture
        return _file(request, path, sort, name + path.suffix, headers)
    except FileNotFoundError:  # deleted meanwhile
        raise _missing(kind) from None


def _file(request: Request, path: Path, sort: str, name: str, headers: dict[str, str]) -> Response:
    own = {"Cache-Control": "private, max-age=3600", **headers}
    response = FileResponse(
        path, media_type=sort, filename=name, headers=own, stat_result=path.stat(),
        content_disposition_type="inline",
    )  # fmt: skip
    tags = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    if response.headers["etag"] in tags or "*" in tags:
        return Response(status_code=304, headers={"ETag": response.headers["etag"], **own})
    if not request.headers.get("range", "bytes=").strip().lower().startswith("bytes="):
        # RFC 9110, 14.2: a unit that is not understood is as if there were none.
        scope_headers = [(k, v) for k, v in request.scope["headers"] if k != b"range"]
        request.scope["headers"] = scope_headers
    return response


async def _events(engine: Any, id: str) -> AsyncIterator[ServerSentEvent]:
    shown, job = 0, None
    async with aclosing(engine.changes(id)) as changes:
        async for job in changes:
            live = engine.live(id)
            yield event("progress", wire.made(job, live).model_dump_json())
            if live is not None and live.preview and live.preview_step > shown:
                shown = live.preview_step
                yield event("preview", json.dumps({"step": shown, "b64_json": b64(live.preview)}))
    if job is not None:
        yield event("done", wire.made(job, None).model_dump_json())


def event(name: str, data: str) -> ServerSentEvent:
    return ServerSentEvent(data, event=name, sep="\n")


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def ended(engine: Any, id: str) -> Job:
    """The job when it has ended; refuses if it has no result."""
    job = None
    async with aclosing(engine.changes(id)) as changes:
        async for now in changes:
            job = now
    return with_result(job)


def with_result(job: Job | None) -> Job:
    if job is None or job.active:
        raise Refused(409, "cancelled", "It was deleted before it was made.")
    if job.failure is None:
        return job
    raise Refused(STATUSES.get(job.failure.code, 500), job.failure.code, job.failure.message)


async def while_there(request: Request, work: Awaitable[T]) -> T:
    """What `work` returns; it is cancelled when the client goes away."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise Refused(499, "client_gone", "The client went away.")
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def idempotency(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not (0 < len(key) <= 255 and key.isascii() and key.isprintable()):
        message = f"An Idempotency-Key of {len(key)} characters is not legal: 1 to 255 printable ones are."
        raise Refused(400, "invalid_idempotency_key", message, param="Idempotency-Key")
    return key
