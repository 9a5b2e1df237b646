"""Request limits: bounds on the resources of a client; requests that exceed them are rejected."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass

from starlette.types import Message, Receive, Scope

from weft.serve.api_error import APIError

SINGLE_HEADERS = (b"authorization", b"content-type", b"host", b"idempotency-key", b"origin", b"range")
"""Headers of which two would be read differently by different readers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """What clients may take of the server."""

    head: int = 32 * 2**10
    """Bytes of the address and the headers of a request."""
    body: int = 12 * 2**20
    """Bytes of a request; a data URL is 4/3 of its picture."""
    body_seconds: float = 30.0
    """Time limit for receiving a body."""
    picture: int = 8 * 2**20
    pixels: int = 16_000_000
    decode_seconds: float = 10.0
    decode_memory: int = 2**30
    decoders: int = 2
    """Pictures that are decoded at a time."""
    requests: int = 512
    """Requests that are open at a time, without streams of events."""
    streams: int = 256
    """Streams of events that are open at a time."""


LATE_READ_SECONDS, MAX_LATE_SECONDS = 0.02, 10.0
"""Time to read what has arrived already, and for how long after the time limit that is done."""
DRAIN_SECONDS, DRAIN_BYTES, SILENCE_SECONDS = 5.0, 64 * 2**20, 0.5
"""How much of a rejected body is read, until nothing arrives. Asynchronous clients see only a closed
connection if the response comes before they have sent all of it."""


async def check_head(scope: Scope, receive: Receive, limits: RequestLimits) -> None:
    """Reject a request by its head: too large, ambiguous, or with too large a body."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    size = len(scope["query_string"]) + len(scope["path"]) + sum(len(k) + len(v) for k, v in headers)
    if size > limits.head:
        message = f"The address and the headers are larger than {limits.head // 2**10} KiB together."
        raise APIError(431, "head_too_large", message)
    names = [name for name, _ in headers]
    if b"content-length" in names and b"transfer-encoding" in names:
        # Two servers that take different ones for the end of the body see different requests (smuggling).
        message = "The request has both Content-Length and Transfer-Encoding. Send one of them."
        raise APIError(400, "ambiguous_length", message, close=True)
    for name in SINGLE_HEADERS:
        if names.count(name) > 1:
            raise APIError(400, "repeated_header", f"The header {name.decode()} is repeated. Send it once.")
    declared = dict(headers).get(b"content-length", b"")
    if declared.isdigit() and (len(declared) > 15 or int(declared) > limits.body):
        if len(declared) <= 15 and int(declared) <= DRAIN_BYTES and b"expect" not in names:
            await _drain(receive)  # a client that expects "100 Continue" has sent nothing yet
        raise _too_large(limits)


def bounded(receive: Receive, limits: RequestLimits) -> Receive:
    """Wrap `receive` to count the body while it is read: its declared length may be wrong, or missing."""
    end, size, more = time.monotonic() + limits.body_seconds, 0, True

    async def receive_bounded() -> Message:
        nonlocal size, more
        if not more:  # the caller waits for the end of the connection
            return await receive()
        try:
            message = await _receive_until(receive, end)
        except asyncio.TimeoutError:
            reason = f"The body did not arrive within {limits.body_seconds:g} s. Send it faster."
            raise APIError(408, "body_timeout", reason) from None
        size += len(message.get("body", b""))
        more = message.get("more_body", False)
        if size > limits.body:
            if more:
                await _drain(receive)
            raise _too_large(limits)
        return message

    return receive_bounded


def _too_large(limits: RequestLimits) -> APIError:
    message = f"The body is larger than {limits.body / 2**20:g} MiB. Send a smaller picture."
    return APIError(413, "input_too_large", message)


async def _receive_until(receive: Receive, end: float) -> Message:
    """Receive within the time limit; what arrived while this process was busy is read even after it."""
    if (left := end - time.monotonic()) > 0:
        with suppress(asyncio.TimeoutError):
            return await asyncio.wait_for(receive(), left)
    # Bounded, or a client that sends a byte at a time would be read for ever.
    return await asyncio.wait_for(receive(), LATE_READ_SECONDS if left > -MAX_LATE_SECONDS else 0)


async def _drain(receive: Receive) -> None:
    """Read and discard the rest of a body, within bounds."""
    end, left, more = time.monotonic() + DRAIN_SECONDS, DRAIN_BYTES, True
    with suppress(asyncio.TimeoutError):
        while left > 0 and more:
            message = await asyncio.wait_for(receive(), min(SILENCE_SECONDS, end - time.monotonic()))
            left, more = left - len(message.get("body", b"")), message.get("more_body", False)
