"""The door: what every request passes on its way in, and every answer on its way out."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from weft.serve import auth, logs
from weft.serve.errors import Refused, by_status
from weft.serve.metrics import Metrics
from weft.serve.uploads import Bounds, Limits

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:; "
    "object-src 'none'; base-uri 'none'; frame-ancestors 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_log = logging.getLogger("weft.serve")


class Door:
    """ASGI middleware around everything: ids, who may ask, bounds, the envelope, headers, log and metrics."""

    def __init__(self, app: Any, *, key: str | None, limits: Limits, metrics: Metrics) -> None:
        self.app, self.key, self.limits, self.metrics = Bounds(app, limits), key, limits, metrics
        self.inside = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        answer, began = Answer(scope, send, logs.new_request()), time.perf_counter()
        self.inside += 1
        try:
            if self.inside > self.limits.requests and scope["path"] != "/live":
                message = f"{self.limits.requests} requests are being answered. Try again soon."
                raise Refused(503, "busy", message)
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
            auth.check(scope["method"], scope["path"], headers, self.key)
            await self.app(scope, receive, answer.send)
        except Refused as refused:
            await answer.refuse(refused)
        except Exception:
            _log.exception("a request failed", extra={"method": scope["method"], "route": route(scope)})
            await answer.refuse(by_status(500, f"Something went wrong here. The log has it as {answer.id}."))
        finally:
            self.inside -= 1
            self._told(scope, answer, time.perf_counter() - began)

    def _told(self, scope: Any, answer: Answer, seconds: float) -> None:
        place = route(scope)
        self.metrics.request(place, scope["method"], answer.status, seconds)
        logs.access.info("request", extra={
            "method": scope["method"], "route": place, "status": answer.status, "seconds": round(seconds, 4),
            "client": (scope.get("client") or ("",))[0],
        })  # fmt: skip


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
    405: "That method is not for this address. The Allow header has those that are.",
    416: "The range is outside of the file. The Content-Range header has its size.",
}


def route(scope: Any) -> str:
    """The template of the route, never what was asked for: addresses are without end, labels are not."""
    return getattr(scope.get("route"), "path", None) or "none"
