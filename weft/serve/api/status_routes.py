"""Routes of the server itself: its model, plans, ranks, health and metrics."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Depends, Query, Response

from weft.serve.api import schemas
from weft.serve.api.openapi import Responses, error_responses
from weft.serve.api.query import check_query
from weft.serve.api.resolve import model_facts, model_not_found, resolve_image, resolve_video
from weft.serve.jobs import JsonObject
from weft.serve.metrics import Metrics

if TYPE_CHECKING:
    from weft.serve.engine import Engine

TEXT: Responses = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}
DISK_FULL = (
    "The disk of the server is full: no job is accepted or started until there is room; results of jobs that "
    "end meanwhile are stored then. Deleting jobs makes room."
)
OVER_QUOTA = "The results fill their quota: jobs are accepted again when some are deleted or expire."


def routes(engine: Engine, metrics: Metrics) -> APIRouter:
    router, created = APIRouter(tags=["status"], dependencies=[Depends(check_query)]), int(time.time())

    def model() -> schemas.ModelInfo:
        return schemas.ModelInfo(id=engine.name, created=created, weft=engine.about())

    @router.get("/v1/models", response_model=schemas.ModelList)
    def list_models() -> schemas.ModelList:
        """List the one model that this server has."""
        return schemas.ModelList(data=[model()])

    @router.get("/v1/models/{id:path}", response_model=schemas.ModelInfo, responses=error_responses(404))
    def retrieve_model(id: str) -> schemas.ModelInfo:
        if id != engine.name:
            raise model_not_found(id, engine, param="id")
        return model()

    @router.get("/v1/plan", response_model=JsonObject, responses=error_responses(400, 503))
    def plan(
        size: Annotated[schemas.Size | None, Query()] = None,
        frames: Annotated[int | None, Query(ge=1, le=100_000), schemas.PLAIN_NUMBER] = None,
        steps: Annotated[int | None, Query(ge=1, le=1000), schemas.PLAIN_NUMBER] = None,
        guidance_scale: Annotated[float | None, Query(ge=0, le=100), schemas.PLAIN_NUMBER] = None,
    ) -> JsonObject:
        """Explain how a request would be split over the ranks, how long it would take, and why."""
        facts, prompt = model_facts(engine), "a"  # in every vocabulary; the duration does not depend on it
        if (frames or facts.frames) == 1 and "image" in facts.kinds:
            image = schemas.ImageRequest(
                prompt=prompt, size=size, num_inference_steps=steps, guidance_scale=guidance_scale
            )
            return engine.explain(resolve_image(image, engine))
        video = schemas.VideoRequest(
            prompt=prompt, size=size, num_inference_steps=steps, num_frames=frames,
            guidance_scale=guidance_scale,
        )  # fmt: skip
        return engine.explain(resolve_video(video, engine, needs_image=False))

    @router.get("/v1/status", response_model=JsonObject)
    def status() -> JsonObject:
        """Return the ranks with their load and memory, running and queued jobs, and the last timeline."""
        return engine.snapshot()

    _add_probes(router, engine, metrics)
    return router


def _add_probes(router: APIRouter, engine: Engine, metrics: Metrics) -> None:
    @router.get(
        "/health", response_model=schemas.HealthResponse, response_model_exclude_none=True,
        responses={503: {"model": schemas.HealthResponse}},
    )  # fmt: skip
    async def health(response: Response) -> schemas.HealthResponse:
        """Return 200 when jobs are accepted, 503 while starting, stopping, failed, or with a full disk."""
        state, reason = engine.status(), engine.trouble
        if state == "ok" and engine.store.reserve.is_full:
            state, reason = "disk_full", DISK_FULL
        elif state == "ok":  # results expire: what the quota rejects now, it accepts later
            reason = OVER_QUOTA if engine.disk.used() >= engine.disk.quota else ""
        if state != "ok":
            response.status_code = 503
            response.headers["Retry-After"] = "2"
        return schemas.HealthResponse(status=state, reason=reason or None)  # type: ignore[arg-type]

    @router.get("/live", response_model=schemas.LivenessResponse)
    async def live() -> schemas.LivenessResponse:
        """Return 200 while the process responds."""
        return schemas.LivenessResponse()

    @router.get("/metrics", response_class=Response, responses=TEXT)
    def prometheus() -> Response:
        """Return the metrics for Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
