"""ASGI middleware: limits, authentication, request ids, the error envelope, headers, log and metrics."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from starlette.requests import Request

from weft.serve import auth, logs
from weft.serve.errors import Refused, by_status, is_out_of_files
from weft.serve.limits import Bounds, Limits
from weft.serve.metrics import Metrics

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "object-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
PROBES = ("/live", "/health")
"""Answered however many requests there are."""
_log = logging.getLogger("weft.serve")


class Middleware:
    """Around everything."""

    def __init__(self, app: Any, *, key: str | None, limits: Limits, metrics: Metrics) -> None:
        self.app, self.key, self.metrics = Bounds(app, limits), key, metrics
        self.requests, self.streams = Budget("requests", limits.requests), Budget("streams", limits.streams)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        answer, began = Answer(scope, send, logs.new_request()), time.perf_counter()
        slot = scope["weft.slot"] = Slot(self.streams)
        try:
            if scope["path"] not in PROBES:
                slot.take(self.requests)
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
            auth.check(scope["method"], scope["path"], headers, self.key)
            await self.app(scope, receive, answer.send)
        except Refused as refused:
            await answer.refuse(refused)
        except Exception as error:
            if is_out_of_files(error):
                await answer.refuse(Refused(503, "busy", "Too many files are open. Try again soon."))
            else:
                _log.exception("a request failed", extra={"method": scope["method"], "route": route(scope)})
                message = f"Something went wrong here. The log has it as {answer.id}."
                await answer.refuse(by_status(500, message))
        finally:
            slot.release()
            self._told(scope, answer, time.perf_counter() - began)

    def _told(self, scope: Any, answer: Answer, seconds: float) -> None:
        place = route(scope)
        self.metrics.request(place, scope["method"], answer.status, seconds)
        logs.access.info("request", extra={
            "method": scope["method"], "route": place, "status": answer.status, "seconds": round(seconds, 4),
            "client": (scope.get("client") or ("",))[0],
        })  # fmt: skip


class Budget:
    """So many at a time; only the event loop counts."""

    def __init__(self, name: str, most: int) -> None:
        self.name, self.most, self.open = name, most, 0


class Slot:
    """What one request takes: of the requests, or as a stream, which may last for hours, of the streams."""

    def __init__(self, streams: Budget) -> None:
        self.streams = streams
        self._budget: Budget | None = None

    def take(self, budget: Budget) -> None:
        if budget.open >= budget.most:
            message = f"{budget.most} {budget.name} are open, and no more may be. Try again soon."
            raise Refused(503, "busy", message)
        self.release()
        budget.open += 1
        self._budget = budget

    def release(self) -> None:
        if self._budget is not None:
            self._budget.open -= 1
        self._budget = None


def open_stream(request: Request) -> None:
    """Call before the answer is a stream of events; refuses if there are too many."""
    slot = request.scope["weft.slot"]
    slot.take(slot.streams)


class Answer:
    """Sends an answer with our headers; an error that is not in the envelope yet is put into it."""

    def __init__(self, scope: Any, send: Any, id: str) -> None:
        self.scope, self._send, self.id = scope, send, id
        self.status, self.started, self._replaced = 0, False, False

    async def send(self, message: Any) -> None:
        if message["type"] != "http.response.start":
            if not self._replaced:
                await self._send(message)
            return
        headers = {k.lower(): v for k, v in message["headers"]}
        if message["status"] >= 400 and not headers.get(b"content-type", b"").startswith(b"application/json"):
            kept = {
                k: v.decode("latin-1")
                for k, v in message["headers"]
                if k.lower() in (b"content-range", b"allow")
            }
            await self.refuse(
                by_status(message["status"], REASONS.get(message["status"], "That cannot be done.")), kept
            )
            self._replaced = True
            return
        await self._start(message["status"], message["headers"])

    async def refuse(self, refused: Refused, more: dict[bytes, str] | None = None) -> None:
        if self.started:  # half an answer cannot be taken back; the client sees that it is cut off
            return
        body = json.dumps(refused.body()).encode()
        headers = {k.encode(): v for k, v in refused.headers().items()} | (more or {})
        headers |= {b"content-type": "application/json", b"content-length": str(len(body))}
        await self._start(refused.status, [(k, v.encode("latin-1")) for k, v in headers.items()])
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started, self.status = True, status
        ours = [(k.lower().encode(), v.encode()) for k, v in {"x-request-id": self.id, **HEADERS}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": [*headers, *ours]})


REASONS = {
    400: "The Range header is malformed. Send it as 'bytes=0-99'.",
    404: "There is nothing here. GET /openapi.json lists what there is.",
    416: "The range is outside of the file. The Content-Range header has its size.",
}


def route(scope: Any) -> str:
    """The template of the route, never what was asked for: addresses are without end, labels are not."""
    return getattr(scope.get("route"), "path", None) or "none"
