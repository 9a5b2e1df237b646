"""The app: every route over one engine, behind one middleware.

    app = create_app(engine, key=None, limits=Limits())
    uvicorn.Server(server_config(app, host="127.0.0.1", port=8000)).run()

Errors of all routes and of the framework are put into one envelope here; routes only raise.
"""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles

from weft.serve import images, results, status, videos
from weft.serve.document import document
from weft.serve.errors import Refused, by_status, disk_full, invalid, shown
from weft.serve.limits import Limits
from weft.serve.metrics import Metrics
from weft.serve.middleware import REASONS, Middleware
from weft.serve.reserve import DiskFull
from weft.serve.routing import Routes

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
    routers = [
        videos.routes(engine, limits), images.routes(engine, limits), results.routes(engine, "video"),
        results.routes(engine, "image"), status.routes(engine, metrics),
    ]  # fmt: skip
    routes = Routes([*routers, app.router])
    for router in routers:
        app.include_router(router, dependencies=[Depends(routes.check_query)])
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
    app.add_exception_handler(HTTPException, partial(_http, routes))  # type: ignore[arg-type]
    app.add_middleware(Middleware, key=key, limits=limits, metrics=metrics)
    return app


def _refused(_: Request, refused: Refused) -> JSONResponse:
    return JSONResponse(refused.body(), refused.status, refused.headers())


def _full(request: Request, _: DiskFull) -> JSONResponse:
    return _refused(request, disk_full())


def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    return _refused(request, invalid(error.errors()))


def _http(routes: Routes, request: Request, error: HTTPException) -> JSONResponse:
    """Of the framework: no such path, or not by this method."""
    refused = by_status(error.status_code, REASONS.get(error.status_code, str(error.detail)))
    headers = dict(error.headers or {})
    if refused.status == 405:
        methods = ", ".join(routes.methods(request.url.path) or ["GET", "HEAD"])  # or a file of the page
        refused.message = f"{shown(request.method)} is not for this address. Use {methods}."
        headers["Allow"] = methods
    return JSONResponse(refused.body(), refused.status, {**headers, **refused.headers()})


def server_config(app: FastAPI, *, host: str, port: int) -> Any:
    """How uvicorn is to serve it: it says little of itself and believes no proxy."""
    import uvicorn

    return uvicorn.Config(
        app, host=host, port=port, log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_keep_alive=10, timeout_graceful_shutdown=30, backlog=128,
    )  # fmt: skip
