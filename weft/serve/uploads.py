"""Uploads: bodies that are read in bounded memory, and pictures that another process decodes."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

from fastapi import Request
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from weft.core.errors import InputError
from weft.core.files import parse_json
from weft.serve.disk import Disk
from weft.serve.errors import Refused, invalid, shown
from weft.serve.limits import Limits
from weft.serve.reserve import DiskFull
from weft.serve.spool import CHUNK, Body, SpoolFile, receive
from weft.serve.wire import Reference, Sent

FILE = "input_reference"
JSON, FORM = "application/json", "multipart/form-data"
MAGIC = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
DECODE = Path(__file__).with_name("decode.py")
TOO_MANY_PIXELS, NO_ROOM = 3, 4
"""Exit codes of `decode.py`."""
MAX_COMMAS = 10_000
"""In a JSON body, with those of its texts: each error of pydantic's takes a kilobyte."""
CHARSETS = (b"utf-8", b"utf8", b"us-ascii")
SentT = TypeVar("SentT", bound=Sent)


@dataclass(frozen=True, slots=True)
class Posted(Generic[SentT]):
    asks: SentT
    picture: SpoolFile | None
    """As a PNG that was decoded once and encoded again; gone when the request is answered, unless moved."""
    canonical: bytes
    """The same for two requests that ask for the same."""


@dataclass(frozen=True, slots=True)
class Source:
    """A picture as it came."""

    file: SpoolFile
    digest: bytes


def posted(
    kind: type[SentT], limits: Limits, disk: Disk
) -> Callable[[Request], AsyncIterator[Posted[SentT]]]:
    """A dependency that reads a body: JSON strictly, and the words of a form as what they stand for.

    Bodies of all clients come at once, to files. One large one at a time is taken into memory, in a thread of
    its own: what the allocator keeps for each thread would add up.
    """
    slots, parsing = asyncio.Semaphore(limits.decoders), ThreadPoolExecutor(1, "weft-parse")
    takes_files = FILE in kind.model_fields

    async def read(request: Request) -> AsyncIterator[Posted[SentT]]:
        sort = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if sort not in (JSON, FORM if takes_files else JSON):
            legal = JSON + (f" or {FORM}" if takes_files else "")
            message = f"A body of content-type {shown(sort)!r} is not read. Send {legal}."
            raise Refused(415, "unsupported_media_type", message)
        with ExitStack() as stack:
            with await _received(request, disk) as body:
                keep = partial(_kept, spool=lambda: stack.enter_context(disk.spool()), limits=limits)
                parse = partial(_form if sort == FORM else _json, request.headers, body, kind, keep)
                thread = parsing if body.is_large else None
                asks, source = await asyncio.get_running_loop().run_in_executor(thread, parse)
            picture = None
            if source is not None:
                async with slots:
                    picture = stack.enter_context(await run_in_threadpool(disk.spool))
                    await decoded(source.file, picture, limits)
                await run_in_threadpool(picture.sync)  # not when a job is made: the database is locked then
                source.file.close()
            canonical = asks.model_dump_json(exclude_none=True, exclude={FILE}).encode()
            yield Posted(asks, picture, canonical + b"\0" + (source.digest if source else b""))

    return read


async def _received(request: Request, disk: Disk) -> Body:
    try:
        return await receive(request.stream(), disk.spool)
    except ClientDisconnect:
        raise Refused(499, "client_gone", "The client went away.") from None


Keep = Callable[[Iterator[bytes]], Source]


def _json(_: Headers, body: Body, kind: type[SentT], keep: Keep) -> tuple[SentT, Source | None]:
    """What is asked, and the picture that came with it."""

    def parse() -> SentT:
        data = body.read()
        if data.count(b",") > MAX_COMMAS:
            message = f"The body has more than {MAX_COMMAS} commas, and no request needs as many."
            raise Refused(400, "invalid_json", message)
        asks = kind.model_validate_json(data, strict=True)
        try:
            parse_json(data, "The body")  # pydantic takes the last of two equal keys
        except InputError as error:
            raise Refused(400, "invalid_json", str(error)) from None
        return asks

    return _with_picture(kind, parse, keep)


def _form(headers: Headers, body: Body, kind: type[SentT], keep: Keep) -> tuple[SentT, Source | None]:
    fields, upload = asyncio.run(_fields(headers, body))  # it never waits: all is there
    with upload.file if upload else ExitStack():
        asks, source = _with_picture(kind, lambda: kind.model_validate_strings(fields), keep)
        return asks, keep(iter(partial(upload.file.read, CHUNK), b"")) if upload else source


def _with_picture(kind: type[SentT], parse: Callable[[], SentT], keep: Keep) -> tuple[SentT, Source | None]:
    try:
        asks = parse()
    except ValidationError as error:
        known = [*kind.model_fields, *Reference.model_fields]
        raise invalid(error.errors(include_url=False), known) from error
    reference: Reference | None = getattr(asks, FILE, None)
    if reference is None:
        return asks, None
    url, reference.image_url = reference.image_url, ""  # megabytes that nobody asks for again
    return asks, keep(_from_base64(url))


class _Parser(MultiPartParser):
    spool_max_size = 2**30  # the body is bounded, and in a file of ours: no second one in TMPDIR


async def _fields(headers: Headers, body: Body) -> tuple[dict[str, Any], UploadFile | None]:
    """The text fields of a form, and its file."""

    async def stream() -> AsyncGenerator[bytes, None]:
        for piece in body.pieces():
            yield piece

    charset = parse_options_header(headers["content-type"])[1].get(b"charset", b"utf-8")
    if charset.lower() not in CHARSETS:  # those that Python has may take hours, or raise anything
        message = f"A form in {shown(charset.decode('latin-1'))!r} is not read. Send it in UTF-8."
        raise Refused(400, "invalid_form", message)
    try:
        limits: Any = {"max_files": 1, "max_fields": 40, "max_part_size": 2**30}
        form = await _Parser(headers, stream(), **limits).parse()
    except MultiPartException as error:
        message = f"The form is malformed: {shown(error.message)} Send {FORM} as RFC 7578 has it."
        raise Refused(400, "invalid_form", message) from None
    try:
        fields = _named_once(form)
    except Refused:
        await form.close()
        raise
    if (url := fields.pop(f"{FILE}[image_url]", None)) is not None:  # how OpenAI's client flattens objects
        fields[FILE] = {"image_url": url}
    upload = fields.pop(FILE) if isinstance(fields.get(FILE), UploadFile) else None
    return fields, upload


def _named_once(form: FormData) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in form.multi_items():
        if not isinstance(value, str) and name != FILE:
            message = f"{shown(name)!r} is a file. Only {FILE} may be one."
            raise Refused(400, "unknown_field", message, param=FILE)
        if name in fields or (name.startswith(FILE) and any(each.startswith(FILE) for each in fields)):
            message = f"The field {shown(name)!r} is given twice."
            raise Refused(400, "invalid_form", message, param=shown(name))
        fields[name] = value
    return fields


def _from_base64(url: str) -> Iterator[bytes]:
    """The bytes in a data URL, a little at a time."""
    start = url.index(",") + 1
    for at in range(start, len(url), CHUNK):
        piece = url[at : at + CHUNK]
        try:
            if "=" in piece and at + CHUNK < len(url):
                raise binascii.Error("padding before the end")
            yield base64.b64decode(piece, validate=True)
        except (binascii.Error, ValueError):
            raise _no_picture("its base64 does not decode") from None


def _kept(pieces: Iterator[bytes], *, spool: Callable[[], SpoolFile], limits: Limits) -> Source:
    """Write a picture to a file, unless it is too large."""
    file, digest = spool(), hashlib.sha256()
    for piece in pieces:
        if file.size + len(piece) > limits.picture:
            most = f"{limits.picture / 2**20:g} MiB"
            message = f"The picture is larger than {most}. Send a smaller one."
            raise Refused(413, "input_too_large", message, param=FILE)
        digest.update(piece)
        file.write(piece)
    return Source(file, digest.digest())


async def decoded(source: SpoolFile, picture: SpoolFile, limits: Limits) -> None:
    """Write `source` to `picture` as PNG, by a process that may neither take much memory nor long."""
    source.file.seek(0)
    head = source.file.read(12)
    sort = next((sort for magic, sort in MAGIC.items() if head.startswith(magic)), None)
    if sort is None or (sort == "webp" and head[8:12] != b"WEBP"):
        raise _no_picture("its first bytes are of none of these")
    source.file.seek(0)
    bounds = map(str, (sort, limits.pixels, limits.decode_memory, int(limits.decode_seconds)))
    # -I: neither the environment nor the folder that the server was started in decide what is imported.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(DECODE), *bounds, env={},
        stdin=source.file, stdout=picture.file, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        code = await asyncio.wait_for(process.wait(), limits.decode_seconds)
    except asyncio.TimeoutError:
        raise _no_picture("it takes too long to decode") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code == TOO_MANY_PIXELS:
        raise _no_picture(f"it has more than {limits.pixels} pixels")
    if code == NO_ROOM:
        raise DiskFull("The disk has no room for a picture.", hint="Make room on it.")
    size = picture.path.stat().st_size
    if code or not size:
        raise _no_picture("it does not decode")
    picture.count(size)


def _no_picture(reason: str) -> Refused:
    message = f"{FILE} is not a usable picture: {reason}. Send a PNG, JPEG or WebP."
    return Refused(400, "invalid_image", message, param=FILE)
