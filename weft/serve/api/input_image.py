"""Input images: save what a client sent, and have a process that can be killed re-encode it as PNG."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from weft.serve.api.limits import RequestLimits
from weft.serve.api_error import APIError
from weft.serve.reserve import DiskFull
from weft.serve.spool import SpoolFile

IMAGE_FIELD = "input_reference"
CHUNK_BYTES = 2**16
MAGIC = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
DECODER = Path(__file__).with_name("decode_image.py")
TOO_MANY_PIXELS, DISK_FULL = 3, 4
"""Exit codes of the decoder."""


def chunks_of_data_url(url: str) -> Iterator[bytes]:
    """Decode the base64 of a data URL chunk by chunk."""
    start = url.index(",") + 1
    for at in range(start, len(url), CHUNK_BYTES):
        chunk = url[at : at + CHUNK_BYTES]
        try:
            if "=" in chunk and at + CHUNK_BYTES < len(url):
                raise binascii.Error("padding before the end")
            yield base64.b64decode(chunk, validate=True)
        except (binascii.Error, ValueError):
            raise _invalid_image("its base64 does not decode") from None


def save_image(
    chunks: Iterable[bytes], spool: Callable[[], SpoolFile], limits: RequestLimits
) -> tuple[SpoolFile, bytes]:
    """Write an image to a file, unless it is too large; return the file and the digest of its bytes."""
    file, digest = spool(), hashlib.sha256()
    for chunk in chunks:
        if file.size + len(chunk) > limits.picture:
            message = f"The picture is larger than {limits.picture / 2**20:g} MiB. Send a smaller one."
            raise APIError(413, "input_too_large", message, param=IMAGE_FIELD)
        digest.update(chunk)
        file.write(chunk)
    return file, digest.digest()


async def decode_image(source: SpoolFile, target: SpoolFile, limits: RequestLimits) -> None:
    """Write `source` to `target` as PNG, by a process of bounded memory and time."""
    source.file.seek(0)
    head = source.file.read(12)
    format = next((format for magic, format in MAGIC.items() if head.startswith(magic)), None)
    if format is None or (format == "webp" and head[8:12] != b"WEBP"):
        raise _invalid_image("its first bytes are of none of these")
    source.file.seek(0)
    bounds = map(str, (format, limits.pixels, limits.decode_memory, int(limits.decode_seconds)))
    # -I: neither the environment nor the working directory decide what is imported.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(DECODER), *bounds, env={},
        stdin=source.file, stdout=target.file, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        code = await asyncio.wait_for(process.wait(), limits.decode_seconds)
    except asyncio.TimeoutError:
        raise _invalid_image("it takes too long to decode") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if code == TOO_MANY_PIXELS:
        raise _invalid_image(f"it has more than {limits.pixels} pixels")
    if code == DISK_FULL:
        raise DiskFull("The disk has no room for a picture.", hint="Make room on it.")
    size = target.path.stat().st_size
    if code or not size:
        raise _invalid_image("it does not decode")
    target.count(size)


def _invalid_image(reason: str) -> APIError:
    message = f"{IMAGE_FIELD} is not a usable picture: {reason}. Send a PNG, JPEG or WebP."
    return APIError(400, "invalid_image", message, param=IMAGE_FIELD)
