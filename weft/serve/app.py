"""The app: every route over one engine, behind one door.

    app = create_app(engine, key=None, limits=Limits())
    uvicorn.Server(server_config(app, host="127.0.0.1", port=8000)).run()

Errors of all routes and of the framework are put into one envelope here; routes only raise.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from weft.serve import images, results, status, videos
from weft.serve.disk import DiskFull
from weft.serve.document import document
from weft.serve.door import REASONS, Door
from weft.serve.errors import Refused, by_status, invalid
from weft.serve.metrics import Metrics
from weft.serve.uploads import Limits

__all__ = ["Limits", "create_app", "server_config"]
PAGE = Path(__file__).parent / "page"


class _Page(StaticFiles):
    """A browser asks each time whether a file changed: a new server has a new page."""

    def file_response(self, *given: Any, **named: Any) -> Response:
        response = super().file_response(*given, **named)
        response.headers["Cache-Control"] = "no-cache"
        return response


def create_app(engine: Any, *, key: str | None = None, limits: Limits) -> FastAPI:
    """The server's app; the engine is started and closed by who made it."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    metrics = Metrics(engine)
    app.include_router(videos.routes(engine, limits))
    app.include_router(images.routes(engine, limits))
    app.include_router(results.routes(engine, "video"))
    app.include_router(results.routes(engine, "image"))
    app.include_router(status.routes(engine, metrics))
    app.mount("/page", _Page(directory=PAGE, check_dir=False))

    @cache
    def said() -> dict[str, Any]:
        return document(app, key=key is not None)

    @app.get("/openapi.json", include_in_schema=False)
    def openapi() -> JSONResponse:
        return JSONResponse(said())

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(PAGE / "index.html", headers={"Cache-Control": "no-cache"})

    app.add_exception_handler(Refused, _refused)  # type: ignore[arg-type]
    app.add_exception_handler(DiskFull, _full)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http)  # type: ignore[arg-type]
    app.add_middleware(Door, key=key, limits=limits, metrics=metrics)
    return app


def _refused(_: Request, refused: Refused) -> JSONResponse:
    return JSONResponse(refused.body(), refused.status, refused.headers())


def _full(request: Request, _: DiskFull) -> JSONResponse:
    message = "The disk space for results is used up. Delete some, or try again when they expire."
    return _refused(request, Refused(503, "disk_full", message, retry=60))


def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    return _refused(request, invalid(error.errors()))


def _http(_: Request, error: HTTPException) -> JSONResponse:
    refused = by_status(error.status_code, REASONS.get(error.status_code, str(error.detail)))
    return JSONResponse(refused.body(), refused.status, {**(error.headers or {}), **refused.headers()})


def server_config(app: FastAPI, *, host: str, port: int) -> Any:
    """How uvicorn is to serve it: it says little of itself and believes no proxy."""
    import uvicorn

    return uvicorn.Config(
        app, host=host, port=port, log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_keep_alive=10, timeout_graceful_shutdown=30, backlog=512,
    )  # fmt: skip
