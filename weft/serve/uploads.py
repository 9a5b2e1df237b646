"""Uploads: bodies that are bounded while they are read, and pictures that another process decodes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import ValidationError

from weft.serve.errors import Refused, invalid, shown
from weft.serve.wire import Reference, Sent

FILE = "input_reference"
FORM = "multipart/form-data"
MAGIC = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
DECODE = Path(__file__).with_name("decode.py")
SentT = TypeVar("SentT", bound=Sent)


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
    """Requests that are answered at a time; a stream of events is one for as long as it lasts."""


@dataclass(frozen=True, slots=True)
class Posted(Generic[SentT]):
    asks: SentT
    picture: bytes | None
    """As a PNG that was decoded once and encoded again."""
    canonical: bytes
    """The same for two requests that ask for the same."""


DRAIN_SECONDS, DRAIN_BYTES = 0.5, 2**20


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
        declared = dict(scope["headers"]).get(b"content-length", b"")
        if declared.isdigit() and (len(declared) > 15 or int(declared) > self.limits.body):
            raise self._too_large()
        return await self.app(scope, self._bounded(receive), send)

    def _bounded(self, receive: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[Any]]:
        until, read, more = time.monotonic() + self.limits.body_seconds, 0, True

        async def bounded() -> Any:
            nonlocal read, more
            if not more:  # only the end of the connection is waited for
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), until - time.monotonic())
            except asyncio.TimeoutError:
                message = f"The body did not come within {self.limits.body_seconds:g} s. Send it faster."
                raise Refused(408, "body_timeout", message) from None
            read += len(message.get("body", b""))
            more = message.get("more_body", False)
            if read > self.limits.body:
                await _drained(receive, message)
                raise self._too_large()
            return message

        return bounded

    def _too_large(self) -> Refused:
        most = f"{self.limits.body / 2**20:g} MiB"
        return Refused(413, "input_too_large", f"The body is larger than {most}. Send a smaller picture.")


async def _drained(receive: Callable[[], Awaitable[Any]], message: Any) -> None:
    """Take some of what still comes: a connection that is closed on it loses the answer."""
    until, left = time.monotonic() + DRAIN_SECONDS, DRAIN_BYTES
    with suppress(asyncio.TimeoutError):
        while left > 0 and message.get("more_body", False):
            message = await asyncio.wait_for(receive(), until - time.monotonic())
            left -= len(message.get("body", b""))


def posted(kind: type[SentT], limits: Limits) -> Callable[[Request], Awaitable[Posted[SentT]]]:
    """A dependency that reads a body: JSON strictly, and the words of a form as what they stand for."""
    slots = asyncio.Semaphore(limits.decoders)

    async def read(request: Request) -> Posted[SentT]:
        sort = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        takes_files = FILE in kind.model_fields
        try:
            if sort == "application/json":
                asks, data = kind.model_validate_json(await request.body(), strict=True), None
            elif sort == FORM and takes_files:
                asks, data = await _form(request, kind, limits)
            else:
                legal = "application/json" + (f" or {FORM}" if takes_files else "")
                message = f"A body of content-type {shown(sort)!r} is not read. Send {legal}."
                raise Refused(415, "unsupported_media_type", message)
        except ValidationError as error:
            known = [*kind.model_fields, *Reference.model_fields]
            raise invalid(error.errors(include_url=False), known) from error
        if data is None and (reference := getattr(asks, FILE, None)) is not None:
            data = _data_url(reference.image_url)
        picture = None
        if data is not None:
            async with slots:
                picture = await decoded(data, limits)
        canonical = asks.model_dump_json(exclude_none=True, exclude={FILE}).encode()
        return Posted(asks, picture, canonical + b"\0" + (data or b""))

    return read


async def _form(request: Request, kind: type[SentT], limits: Limits) -> tuple[SentT, bytes | None]:
    fields: dict[str, Any] = {}
    data = None
    async with request.form(max_files=1, max_fields=40, max_part_size=limits.body) as form:
        for name, value in form.multi_items():
            if not isinstance(value, str):
                if name != FILE:
                    raise Refused(
                        400,
                        "unknown_field",
                        f"{shown(name)!r} is a file. Only {FILE} may be one.",
                        param=FILE,
                    )
                data = await value.read()
            elif name in fields:
                raise Refused(
                    400, "invalid_form", f"The field {shown(name)!r} is given twice.", param=shown(name)
                )
            else:
                fields[name] = value
    if (url := fields.pop(f"{FILE}[image_url]", None)) is not None:  # how OpenAI's client flattens objects
        fields[FILE] = {"image_url": url}
    return kind.model_validate_strings(fields), data


def _data_url(url: str) -> bytes:
    try:
        return base64.b64decode(url.partition(",")[2], validate=True)
    except (binascii.Error, ValueError):
        raise _no_picture("its base64 does not decode") from None


async def decoded(data: bytes, limits: Limits) -> bytes:
    """A picture as PNG, from a process that may neither take much memory nor long."""
    if len(data) > limits.picture:
        most = f"{limits.picture / 2**20:g} MiB"
        raise Refused(
            413, "input_too_large", f"The picture is larger than {most}. Send a smaller one.", param=FILE
        )
    sort = next((sort for magic, sort in MAGIC.items() if data.startswith(magic)), None)
    if sort is None or (sort == "webp" and data[8:12] != b"WEBP"):
        raise _no_picture("its first bytes are of none of these")
    bounds = map(str, (sort, limits.pixels, limits.decode_memory, int(limits.decode_seconds)))
    # -I: neither the environment nor the folder that the server was started in decide what is imported.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(DECODE), *bounds, env={},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        png, _ = await asyncio.wait_for(process.communicate(data), limits.decode_seconds)
    except asyncio.TimeoutError:
        raise _no_picture("it takes too long to decode") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode == 3:
        raise _no_picture(f"it has more than {limits.pixels} pixels")
    if process.returncode or not png:
        raise _no_picture("it does not decode")
    return png


def _no_picture(reason: str) -> Refused:
    message = f"{FILE} is not a usable picture: {reason}. Send a PNG, JPEG or WebP."
    return Refused(400, "invalid_image", message, param=FILE)
