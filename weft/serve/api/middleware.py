"""ASGI middleware: limits, authentication, request ids, the error envelope, headers, log and metrics."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from weft.serve.api import auth, logs
from weft.serve.api.limits import RequestLimits, bounded, check_head
from weft.serve.api_error import (
    APIError,
    disk_full,
    error_of_status,
    is_out_of_descriptors,
    quote_input,
    validation_error,
)  # fmt: skip
from weft.serve.metrics import Metrics
from weft.serve.reserve import DiskFull, is_full

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "object-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
REASONS = {
    400: "The Range header is malformed. Send it as 'bytes=0-99'.",
    404: "Not found. GET /openapi.json lists all addresses, /docs explains them.",
    416: "The range is outside of the file. The Content-Range header has its size.",
}
POLLED = (*auth.PROBES, "/metrics", "/v1/status")
"""Routes that are requested every second. With the files of the page, they are logged as debug."""
_log = logging.getLogger("weft.serve")


class APIMiddleware:
    def __init__(self, app: ASGIApp, *, key: str | None, limits: RequestLimits, metrics: Metrics) -> None:
        self.app, self.key, self.limits, self.metrics = app, key, limits, metrics
        self.slots = Slots(limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        response, began = _Response(scope, receive, send), time.perf_counter()
        scope["weft.slots"] = self.slots
        try:
            if scope["path"] not in auth.PROBES:
                self.slots.acquire(scope, "requests")
            auth.check_request(scope["method"], scope["path"], Headers(scope=scope), self.key)
            await check_head(scope, receive, self.limits)
            await self.app(scope, bounded(receive, self.limits), response.send)
        except Exception as error:  # noqa: BLE001 - logged where it is none of a client's
            await response.send_error(_api_error(error, scope, response.id))
        finally:
            self.slots.release(scope)
            seconds, route = time.perf_counter() - began, route_path(scope)
            self.metrics.request(route, scope["method"], response.status, seconds)
            is_polled = route in POLLED or auth.is_page(scope["path"])
            level = logging.DEBUG if is_polled and response.status < 400 else logging.INFO
            logs.access.log(level, "request", extra={
                "method": scope["method"], "route": route, "status": response.status,
                "seconds": round(seconds, 4), "client": (scope.get("client") or ("",))[0],
            })  # fmt: skip


class Slots:
    """Bound the requests that are open at a time, and streams, which may last for hours, apart from them."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits, self._open = {"requests": limits.requests, "streams": limits.streams}, Counter[str]()

    def acquire(self, scope: Scope, kind: str) -> None:
        if self._open[kind] >= self._limits[kind]:
            message = f"{self._limits[kind]} {kind} are open, which is the limit. Try again soon."
            raise APIError(503, "busy", message)
        self.release(scope)
        self._open[kind] += 1
        scope["weft.slot"] = kind

    def release(self, scope: Scope) -> None:
        if (kind := scope.pop("weft.slot", None)) is not None:
            self._open[kind] -= 1


def open_stream(request: Request) -> None:
    """Count the request as a stream of events from now on; raises if too many are open."""
    request.scope["weft.slots"].acquire(request.scope, "streams")


class _Response:
    """Send a response with the headers of all; errors that are not in the envelope are put into it."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.id, self.status, self._is_replaced = logs.new_request(), 0, False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers, status = MutableHeaders(raw=message["headers"]), message["status"]
            if status >= 400 and not headers.get("content-type", "").startswith("application/json"):
                error = error_of_status(status, REASONS.get(status, "That cannot be done."))
                ranges = {name: headers[name] for name in ("content-range",) if name in headers}
                await self.send_error(error, ranges)
                self._is_replaced = True
                return
            self.status = status
            headers.update({"x-request-id": self.id, **HEADERS})
            if auth.is_page(self._scope["path"]):  # a new server has a new page
                headers["Cache-Control"] = "no-cache"
            message = {**message, "headers": headers.raw}
        if not self._is_replaced:
            await self._send(message)

    async def send_error(self, error: APIError, headers: Mapping[str, str] | None = None) -> None:
        if self.status:  # half a response cannot be taken back; the client sees that it is cut off
            return
        response = JSONResponse(error.body(), error.status, {**(headers or {}), **error.headers()})
        await response(self._scope, self._receive, self.send)


def _api_error(error: Exception, scope: Scope, id: str) -> APIError:
    if isinstance(error, APIError):
        return error
    if isinstance(error, DiskFull) or is_full(error):
        return disk_full()
    if isinstance(error, RequestValidationError):
        return validation_error(error.errors())
    if isinstance(error, HTTPException):
        if error.status_code == 405:
            return _method_not_allowed(scope)
        return error_of_status(error.status_code, REASONS.get(error.status_code, error.detail))
    if is_out_of_descriptors(error):
        return APIError(503, "busy", "Too many files are open. Try again soon.")
    extra = {"method": scope["method"], "route": route_path(scope)}
    _log.error("a request failed", extra=extra, exc_info=error)
    return error_of_status(500, f"Internal error. The log of the server has it as {id}.")


def _method_not_allowed(scope: Scope) -> APIError:
    """List all methods of a path, or those of the page; the framework only has those of one route."""
    routes = [route for route in scope["app"].routes if isinstance(route, APIRoute)]
    matching = [route for route in routes if route.path_regex.match(scope["path"])]
    methods = {method for route in matching for method in route.methods or ()} or {
        "GET",
        "HEAD",
    }
    allow = ", ".join(sorted(methods))
    message = f"Method {quote_input(scope['method'])} is not allowed here. Use {allow}."
    return APIError(405, "method_not_allowed", message, allow=allow)


def route_path(scope: Scope) -> str:
    """Return the template of the route: metrics cannot have a label for each address."""
    return getattr(scope.get("route"), "path", None) or "none"
