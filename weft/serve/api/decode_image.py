"""Decode one image from stdin to a PNG on stdout, both files, in a process of its own.

`python -I decode_image.py FORMAT PIXELS MEMORY SECONDS` imports nothing of weft; it exits with 3 if the image
has too many pixels, with 4 if the disk is full, with 1 if it is broken. The kernel bounds what a malicious
image can make the decoder do.
"""

from __future__ import annotations

import errno
import resource
import sys

TOO_MANY_PIXELS, DISK_FULL = 3, 4
"""Exit codes."""


def main(arguments: list[str]) -> int:
    format, pixels, memory, seconds = arguments[0], *map(int, arguments[1:])
    from PIL import Image, ImageOps, PngImagePlugin  # before the limits, which are not for Python itself

    Image.preinit()
    for limit, value in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 4 * pixels + 2**20),  # stdout; a PNG of noise is as large as its pixels
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    # Compressed text in a PNG is a bomb that no count of pixels shows.
    PngImagePlugin.MAX_TEXT_MEMORY = PngImagePlugin.MAX_TEXT_CHUNK = 2**20
    Image.MAX_IMAGE_PIXELS = None  # checked below, before anything is decoded
    try:
        picture = Image.open(sys.stdin.buffer, formats=[format])
        if picture.width * picture.height > pixels:
            return TOO_MANY_PIXELS
        ImageOps.exif_transpose(picture, in_place=True)
        picture.convert("RGB").save(sys.stdout.buffer, "png")
        sys.stdout.buffer.flush()
    except OSError as error:
        return DISK_FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1
    except Exception:  # noqa: BLE001 - whatever the decoder fails on, the image is rejected
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
