"""Limits: what a client may take of the server, and requests that break them before they are read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weft.serve.errors import Refused

ONCE = (b"authorization", b"content-type", b"host", b"idempotency-key", b"origin", b"range")
"""Headers of which two would be read differently by different readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a client may take of the server."""

    head: int = 32 * 2**10
    """Bytes of the address and the headers of a request."""
    body: int = 12 * 2**20
    """Bytes of a request; a data URL is 4/3 of its picture."""
    body_seconds: float = 30.0
    """In which a body must have come."""
    picture: int = 8 * 2**20
    pixels: int = 16_000_000
    decode_seconds: float = 10.0
    decode_memory: int = 2**30
    decoders: int = 2
    """Pictures that are decoded at a time."""
    requests: int = 512
    """Requests that are answered at a time, streams of events not counted."""
    streams: int = 256
    """Streams of events that are open at a time."""


HERE_SECONDS, BUSY_SECONDS = 0.02, 10.0
"""In which what has come is read, and for how long after its time."""
DRAIN_SECONDS, DRAIN_BYTES, SILENCE_SECONDS = 5.0, 64 * 2**20, 0.5
"""How much is read of a body that is refused, until nothing comes. Asynchronous clients see only a closed
connection if the answer comes before they have sent all of it."""


class Bounds:
    """Counts a body while it is read: what it says of its length may be a lie, or missing."""

    def __init__(self, app: Any, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        head = (
            len(scope["query_string"])
            + len(scope["path"])
            + sum(len(k) + len(v) for k, v in scope["headers"])
        )
        if head > self.limits.head:
            most = f"{self.limits.head // 2**10} KiB"
            raise Refused(
                431, "head_too_large", f"The address and the headers are larger than {most} together."
            )
        names = [name for name, _ in scope["headers"]]
        if b"content-length" in names and b"transfer-encoding" in names:
            # Two servers that take different ones for the end of the body see different requests (smuggling).
            message = "The request has both Content-Length and Transfer-Encoding. Send one of them."
            raise Refused(400, "ambiguous_length", message, close=True)
        for name in ONCE:
            if names.count(name) > 1:
                message = f"The header {name.decode()} is given twice. Send it once."
                raise Refused(400, "repeated_header", message)
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and (len(declared) > 15 or int(declared) > self.limits.body):
            if len(declared) <= 15 and int(declared) <= DRAIN_BYTES and b"expect" not in names:
                await _drain(receive)  # whoever expects "100 Continue" has sent nothing yet
            raise self._too_large()
        return await self.app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        until, read, more = time.monotonic() + self.limits.body_seconds, 0, True

        async def bounded() -> Any:
            nonlocal read, more
            if not more:  # only the end of the connection is waited for
                return await receive()
            try:
                message = await _within(receive, until)
            except asyncio.TimeoutError:
                message = f"The body did not come within {self.limits.body_seconds:g} s. Send it faster."
                raise Refused(408, "body_timeout", message) from None
            read += len(message.get("body", b""))
            more = message.get("more_body", False)
            if read > self.limits.body:
                if more:
                    await _drain(receive)
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> Refused:
        most = f"{self.limits.body / 2**20:g} MiB"
        return Refused(413, "input_too_large", f"The body is larger than {most}. Send a smaller picture.")


async def _within(receive: Callable[[], Awaitable[Any]], until: float) -> Any:
    """Wait; time in which this process was busy is not the client's: what has come by then is taken."""
    if (left := until - time.monotonic()) > 0:
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(receive(), left)
    # Whoever sends a byte at a time is not given this for ever.
    return await asyncio.wait_for(receive(), HERE_SECONDS if left > -BUSY_SECONDS else 0)


async def _drain(receive: Callable[[], Awaitable[Any]]) -> None:
    """Read and discard the rest of a body, within bounds."""
    until, left, more = time.monotonic() + DRAIN_SECONDS, DRAIN_BYTES, True
    with suppress(asyncio.TimeoutError):
        while left > 0 and more:
            message = await asyncio.wait_for(receive(), min(SILENCE_SECONDS, until - time.monotonic()))
            left, more = left - len(message.get("body", b"")), message.get("more_body", False)
