"""Build the FastAPI app: all routes over one engine, behind one middleware.

Routes only raise; the middleware turns all errors, also those of the framework, into one envelope.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from weft.serve.api import image_routes, job_routes, status_routes, video_routes
from weft.serve.api.limits import RequestLimits
from weft.serve.api.middleware import APIMiddleware
from weft.serve.api.openapi import openapi_schema
from weft.serve.jobs import JsonObject
from weft.serve.metrics import Metrics

if TYPE_CHECKING:
    from weft.serve.engine import Engine

PAGE = Path(__file__).parents[1] / "page"


def create_app(engine: Engine, *, key: str | None = None, limits: RequestLimits) -> FastAPI:
    """Return the app; starting and closing the engine is left to the caller."""
    app = FastAPI(
        docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False,
        exception_handlers={HTTPException: _reraise, RequestValidationError: _reraise},
    )  # fmt: skip
    metrics = Metrics(engine)
    for router in (
        video_routes.routes(engine, limits), image_routes.routes(engine, limits),
        job_routes.routes(engine, "video"), job_routes.routes(engine, "image"),
        status_routes.routes(engine, metrics),
    ):  # fmt: skip
        app.router.routes += router.routes  # flat, so that `scope["route"]` is the route itself
    app.mount("/page", StaticFiles(directory=PAGE, check_dir=False))

    @cache
    def schema() -> JsonObject:
        return openapi_schema(app, key=key is not None)

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(schema())

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(PAGE / "index.html")

    @app.api_route("/docs", methods=["GET", "HEAD"], include_in_schema=False)
    def reference() -> FileResponse:
        return FileResponse(PAGE / "docs.html")

    app.add_middleware(APIMiddleware, key=key, limits=limits, metrics=metrics)
    return app


async def _reraise(_: Request, error: Exception) -> NoReturn:
    """Leave the errors of the framework to the middleware."""
    raise error
