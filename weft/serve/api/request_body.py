"""Request bodies: receive JSON or a form in bounded memory, and parse it into a request."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from fastapi import Request
from pydantic import ValidationError
from python_multipart.multipart import parse_options_header
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from weft.core.errors import InputError
from weft.core.files import parse_json
from weft.serve.api.input_image import CHUNK_BYTES, IMAGE_FIELD, chunks_of_data_url, decode_image, save_image
from weft.serve.api.limits import RequestLimits
from weft.serve.api.schemas import InputReference, RequestModel
from weft.serve.api_error import APIError, quote_input, validation_error
from weft.serve.disk import Disk
from weft.serve.spool import SpoolFile

JSON, FORM = "application/json", "multipart/form-data"
MEMORY_BYTES = 128 * 2**10
"""Of a body that is not spooled to a file; concurrent requests take so much each."""
MAX_COMMAS = 10_000
"""In a JSON body, with those of its texts: each error of pydantic takes a kilobyte."""
CHARSETS = (b"utf-8", b"utf8", b"us-ascii")
UPLOADED = {"image_url": "data:image/png;base64,"}
"""Stands for an uploaded file while the fields of a form are validated."""
RequestT = TypeVar("RequestT", bound=RequestModel)
Stream = io.BytesIO | io.FileIO
SaveImage = Callable[[Iterable[bytes]], tuple[SpoolFile, bytes]]


def body_parser(
    model: type[RequestT], limits: RequestLimits, disk: Disk
) -> Callable[[Request], AsyncIterator[RequestT]]:
    """Return a dependency that parses a body: JSON strictly, and the texts of a form as what they stand for.

    Bodies of all clients are received at once, to files. One large body at a time is read into memory, in a
    thread of its own: what the allocator keeps for each thread would add up.
    """
    decoders, parse_thread = asyncio.Semaphore(limits.decoders), ThreadPoolExecutor(1, "weft-parse")
    media_types = (JSON, FORM) if IMAGE_FIELD in model.model_fields else (JSON,)

    async def parse(request: Request) -> AsyncIterator[RequestT]:
        media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type not in media_types:
            message = (
                f"Unsupported content-type {quote_input(media_type)!r}. Send {' or '.join(media_types)}."
            )
            raise APIError(415, "unsupported_media_type", message)
        with ExitStack() as stack:
            with ExitStack() as spooled:
                body = await _receive(request, lambda: spooled.enter_context(disk.spool()))
                save = partial(save_image, spool=lambda: stack.enter_context(disk.spool()), limits=limits)
                parse_body = partial(_parse, model, request.headers, body, save, is_form=media_type == FORM)
                thread = parse_thread if isinstance(body, io.FileIO) else None
                parsed = await asyncio.get_running_loop().run_in_executor(thread, parse_body)
            reference: InputReference | None = getattr(parsed, IMAGE_FIELD, None)
            if reference is not None and (source := reference.file) is not None:
                async with decoders:
                    picture = stack.enter_context(await run_in_threadpool(disk.spool))
                    await decode_image(source, picture, limits)
                await run_in_threadpool(picture.sync)  # not on submission, which locks the database
                source.close()
                reference.replace_data(picture, reference.digest)
            yield parsed

    return parse


async def _receive(request: Request, spool: Callable[[], SpoolFile]) -> Stream:
    """Read a body to its end; one of more than `MEMORY_BYTES` is written to a file as it arrives."""
    buffer, file = io.BytesIO(), None
    try:
        async for chunk in request.stream():
            buffer.write(chunk)
            if buffer.tell() > MEMORY_BYTES:
                file = file or await run_in_threadpool(spool)
                await run_in_threadpool(file.write, buffer.getvalue())
                buffer = io.BytesIO()
    except ClientDisconnect:
        raise APIError(499, "client_gone", "The client disconnected.") from None
    if file is not None:
        await run_in_threadpool(file.write, buffer.getvalue())
    body = buffer if file is None else file.file
    body.seek(0)
    return body


def _parse(
    model: type[RequestT], headers: Headers, body: Stream, save: SaveImage, *, is_form: bool
) -> RequestT:
    """Parse a request, and save its image, which may be uploaded or a data URL, to a file."""
    upload = None
    try:
        if is_form:
            fields, upload = asyncio.run(_form_fields(headers, body))  # never waits: all of it has arrived
            parsed = model.model_validate_strings(fields)
        else:
            parsed = _parse_json(model, body.read())
        reference: InputReference | None = getattr(parsed, IMAGE_FIELD, None)
        if reference is not None:
            uploaded = upload and iter(partial(upload.file.read, CHUNK_BYTES), b"")
            reference.replace_data(*save(uploaded or chunks_of_data_url(reference.image_url)))
        return parsed
    except ValidationError as error:
        known = [*model.model_fields, *InputReference.model_fields]
        raise validation_error(error.errors(include_url=False), known) from error
    finally:
        if upload is not None:
            upload.file.close()


def _parse_json(model: type[RequestT], data: bytes) -> RequestT:
    if data.count(b",") > MAX_COMMAS:
        message = f"The body has more than {MAX_COMMAS} commas; no request needs as many."
        raise APIError(400, "invalid_json", message)
    parsed = model.model_validate_json(data, strict=True)
    try:
        parse_json(data, "The body")  # pydantic takes the last of two equal keys
    except InputError as error:
        raise APIError(400, "invalid_json", str(error)) from None
    return parsed


class _Parser(MultiPartParser):
    spool_max_size = 2**30  # the body is bounded, and in a file of ours: no second one in TMPDIR


async def _form_fields(
    headers: Headers, body: Stream
) -> tuple[dict[str, str | dict[str, str]], UploadFile | None]:
    """Return the text fields of a form, and its file."""

    async def stream() -> AsyncGenerator[bytes, None]:
        while chunk := body.read(CHUNK_BYTES):
            yield chunk

    charset = parse_options_header(headers["content-type"])[1].get(b"charset", b"utf-8")
    if charset.lower() not in CHARSETS:  # those of Python may take hours, or raise anything
        message = f"Unsupported form charset {quote_input(charset.decode('latin-1'))!r}. Send UTF-8."
        raise APIError(400, "invalid_form", message)
    try:
        form = await _Parser(headers, stream(), max_files=1, max_fields=40, max_part_size=2**30).parse()
    except MultiPartException as error:
        message = f"The form is malformed: {quote_input(error.message)} Send {FORM} as in RFC 7578."
        raise APIError(400, "invalid_form", message) from None
    try:
        _check_fields(form)
    except APIError:
        await form.close()
        raise
    fields = {name: value for name, value in form.items() if isinstance(value, str)}
    upload = form.get(IMAGE_FIELD)
    if isinstance(upload, UploadFile):
        return {**fields, IMAGE_FIELD: UPLOADED}, upload
    if (url := fields.pop(f"{IMAGE_FIELD}[image_url]", None)) is not None:  # OpenAI's client flattens objects
        return {**fields, IMAGE_FIELD: {"image_url": url}}, None
    return {**fields}, None


def _check_fields(form: FormData) -> None:
    """Reject files in other fields than the image's, and fields that are repeated."""
    names: set[str] = set()
    for name, value in form.multi_items():
        if not isinstance(value, str) and name != IMAGE_FIELD:
            message = f"{quote_input(name)!r} is a file. Only {IMAGE_FIELD} may be a file."
            raise APIError(400, "unknown_field", message, param=IMAGE_FIELD)
        key = IMAGE_FIELD if name.startswith(IMAGE_FIELD) else name
        if key in names:
            message = f"The field {quote_input(name)!r} is repeated. Send it once."
            raise APIError(400, "invalid_form", message, param=quote_input(name))
        names.add(key)
