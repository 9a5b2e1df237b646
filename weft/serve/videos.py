"""POST /v1/videos: a video is asked for, and made while its maker is elsewhere."""

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.concurrency import run_in_threadpool

from weft.serve import fit, results, wire
from weft.serve.document import body, errors, files
from weft.serve.errors import Refused
from weft.serve.jobs import Job
from weft.serve.limits import Limits
from weft.serve.uploads import Posted, posted

ABSENT = ("remix", "edits", "extensions", "characters")
CREATES = errors(400, 404, 408, 409, 413, 415, 429, 503)


def routes(engine: Any, limits: Limits) -> APIRouter:
    router = APIRouter(prefix="/v1/videos", tags=["videos"])
    asks = Annotated[Posted[wire.VideoAsks], Depends(posted(wire.VideoAsks, limits, engine.disk))]

    def submitted(post: Posted[wire.VideoAsks], request: Request) -> Job:
        asked = fit.video(post.asks, engine, image=post.picture is not None)
        return engine.submit(
            asked, priority=post.asks.priority or 0, deadline=post.asks.deadline_seconds,
            key=results.idempotency(request), body=post.canonical, image=post.picture,
        )  # fmt: skip

    @router.post(
        "", response_model=wire.Video, responses=CREATES, openapi_extra=body(wire.VideoAsks, form=True)
    )
    def create(post: asks, request: Request, response: Response) -> Any:  # type: ignore[valid-type]
        """Queues a video. JSON, or a form in which `input_reference` may be a file."""
        job = submitted(post, request)
        response.headers.update(results.POLL)
        return wire.made(job, engine.live(job.id))

    @router.post(
        "/sync", response_class=Response, openapi_extra=body(wire.VideoAsks, form=True),
        responses=files("video") | CREATES,
    )  # fmt: skip
    async def sync(post: asks, request: Request) -> Response:  # type: ignore[valid-type]
        """Answers with the video itself. Who goes away before it is made cancels it."""
        job = await run_in_threadpool(submitted, post, request)
        try:
            job = await results.while_there(request, results.ended(engine, job.id))
        finally:
            if job.active and results.idempotency(request) is None:
                engine.cancel(job.id)
        return await results.sent(engine, job, request, "video", **{"X-Job-Id": job.id})

    @router.post("/{id}/remix", include_in_schema=False)
    @router.post("/edits", include_in_schema=False)
    @router.post("/extensions", include_in_schema=False)
    @router.post("/characters", include_in_schema=False)
    def absent() -> None:
        message = f"This server has no {', '.join(ABSENT)}. POST /v1/videos makes a new video."
        raise Refused(404, "not_found", message)

    return router
