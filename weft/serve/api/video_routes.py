"""POST /v1/videos queues a video; POST /v1/videos/sync waits for it and responds with the file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import APIRouter, Depends, Request, Response
from starlette.concurrency import run_in_threadpool

from weft.serve.api import job_routes, schemas
from weft.serve.api.limits import RequestLimits
from weft.serve.api.openapi import error_responses, file_responses, request_body
from weft.serve.api.query import check_query
from weft.serve.api.request_body import body_parser
from weft.serve.api.resolve import resolve_video
from weft.serve.api_error import APIError
from weft.serve.jobs import Job

if TYPE_CHECKING:
    from weft.serve.engine import Engine

CREATE_ERRORS = error_responses(400, 404, 408, 409, 413, 415, 429, 503)
BODY = request_body(schemas.VideoRequest, form=True)


def routes(engine: Engine, limits: RequestLimits) -> APIRouter:
    router = APIRouter(prefix="/v1/videos", tags=["videos"], dependencies=[Depends(check_query)])
    parsed = Depends(body_parser(schemas.VideoRequest, limits, engine.disk))

    def submit(body: schemas.VideoRequest, request: Request) -> Job:
        reference = body.input_reference
        return engine.submit(
            resolve_video(body, engine), priority=body.priority or 0, deadline=body.deadline_seconds,
            key=job_routes.idempotency_key(request), body=body.fingerprint(),
            image=reference.file if reference else None,
        )  # fmt: skip

    @router.post("", response_model=schemas.VideoResponse, responses=CREATE_ERRORS, openapi_extra=BODY)
    def create(
        request: Request, response: Response, body: schemas.VideoRequest = parsed
    ) -> schemas.JobResponse:
        """Queue a video. The body is JSON, or a form in which `input_reference` may be a file."""
        job = submit(body, request)
        response.headers.update(job_routes.POLL)
        return schemas.job_response(job, engine.live(job.id))

    @router.post(
        "/sync", response_class=Response, openapi_extra=BODY,
        responses=file_responses("video") | CREATE_ERRORS,
    )  # fmt: skip
    async def sync(request: Request, body: schemas.VideoRequest = parsed) -> Response:
        """Respond with the video itself.

        If the client disconnects, the job is cancelled, unless the request has an Idempotency-Key, with which
        it can be repeated.
        """
        job = await run_in_threadpool(submit, body, request)
        try:
            job = await job_routes.while_connected(request, job_routes.wait_for(engine, job.id))
        finally:
            if job.active and job_routes.idempotency_key(request) is None:
                engine.cancel(job.id)
        return await job_routes.content_response(engine, job, request, "video", **{"X-Job-Id": job.id})

    @router.post("/{id}/remix", include_in_schema=False)
    @router.post("/edits", include_in_schema=False)
    @router.post("/extensions", include_in_schema=False)
    @router.post("/characters", include_in_schema=False)
    def unsupported() -> None:
        message = (
            "This server does not remix, edit or extend videos, and has no characters. "
            "POST /v1/videos makes a new video."
        )
        raise APIError(404, "not_found", message)

    return router
