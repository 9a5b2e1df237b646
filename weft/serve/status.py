"""Status: which model, which plan, how the ranks do, whether the server is ready."""

from __future__ import annotations

import time
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from weft.serve import fit, wire
from weft.serve.document import errors
from weft.serve.errors import Refused, shown
from weft.serve.metrics import Metrics

TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}

DISK_FULL = (
    "The disk of the server is full: no job is taken or started until there is room, and what has ended "
    "meanwhile is stored then. Deleting jobs makes room."
)
OVER_QUOTA = "The results fill their quota: jobs are taken again when some are deleted or expire."


def routes(engine: Any, metrics: Metrics) -> APIRouter:
    router, began = APIRouter(tags=["status"]), int(time.time())

    def model() -> wire.Model:
        return wire.Model(id=engine.name, created=began, weft=engine.about())

    @router.get("/v1/models", response_model=wire.Models)
    def models() -> Any:
        """The one model that this server has."""
        return wire.Models(data=[model()])

    @router.get("/v1/models/{id:path}", response_model=wire.Model, responses=errors(404))
    def one_model(id: str) -> Any:
        if id != engine.name:
            message = f"There is no model {shown(id)!r} here. This server has {engine.name!r}."
            raise Refused(404, "model_not_found", message, param="id")
        return model()

    @router.get("/v1/plan", response_model=dict[str, Any], responses=errors(400, 503))
    def plan(
        size: Annotated[wire.Size | None, Query()] = None,
        frames: Annotated[int | None, Query(ge=1, le=100_000), wire.PLAIN] = None,
        steps: Annotated[int | None, Query(ge=1, le=1000), wire.PLAIN] = None,
    ) -> Any:
        """How a request would be split over the ranks, how long it would take, and why."""
        # A prompt that every model takes: how long it takes does not depend on it.
        facts, asks = fit.ready(engine), {"prompt": "a", "size": size, "num_inference_steps": steps}
        if (frames or facts["frames"]) == 1 and "image" in facts["kinds"]:
            return engine.explain(fit.image(wire.ImageAsks(**asks), engine))
        return engine.explain(fit.video(wire.VideoAsks(**asks, num_frames=frames), engine))

    @router.get("/v1/status", response_model=dict[str, Any])
    def status() -> Any:
        """The ranks with their load and memory, what runs and waits, the timeline of the last attention."""
        return engine.snapshot()

    _add_probes(router, engine, metrics)
    return router


def _add_probes(router: APIRouter, engine: Any, metrics: Metrics) -> None:
    @router.get(
        "/health", response_model=wire.Health, response_model_exclude_none=True,
        responses={503: {"model": wire.Health}},
    )  # fmt: skip
    async def health(response: Response) -> Any:
        """200 when jobs are taken, 503 while starting, stopping, failed, or when the disk is full."""
        state, reason = engine.status(), engine.trouble
        if state == "ok" and engine.store.reserve.is_full:
            state, reason = "disk_full", DISK_FULL
        elif state == "ok":  # results expire: what the quota refuses now, it takes later
            reason = OVER_QUOTA if engine.disk.used() >= engine.disk.quota else ""
        if state != "ok":
            response.status_code = 503
            response.headers["Retry-After"] = "2"
        return wire.Health(status=state, reason=reason or None)

    @router.get("/live", response_model=wire.Alive)
    async def live() -> Any:
        """200 while the process answers."""
        return wire.Alive()

    @router.get("/metrics", response_class=Response, responses=TEXT)
    def measured() -> Response:
        """For Prometheus."""
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")
