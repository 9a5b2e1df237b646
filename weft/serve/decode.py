"""Decodes one picture from stdin to a PNG on stdout, both files, as a process that can be spared.

`python -I decode.py FORMAT PIXELS MEMORY SECONDS`, which imports nothing of weft; exits with 3 if it has too
many pixels, with 4 if the disk is full, with 1 if it is broken. What a decoder can be made to do by its input
is bounded by the kernel.
"""

from __future__ import annotations

import errno
import resource
import sys

PIXELS, FULL = 3, 4
"""The exit codes for a picture with too many pixels, and for a disk without room for them."""


def main(given: list[str]) -> int:
    sort, pixels, memory, seconds = given[0], *map(int, given[1:])
    from PIL import Image, ImageOps, PngImagePlugin  # before the limits: Python itself is not to be judged

    Image.preinit()
    for bound, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 4 * pixels + 2**20),  # stdout; a PNG of noise is as large as its pixels
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(bound, (most, most))
    # Compressed text in a PNG is a bomb that no count of pixels shows.
    PngImagePlugin.MAX_TEXT_MEMORY = PngImagePlugin.MAX_TEXT_CHUNK = 2**20
    Image.MAX_IMAGE_PIXELS = None  # judged here, before anything is decoded
    try:
        picture = Image.open(sys.stdin.buffer, formats=[sort])
        if picture.width * picture.height > pixels:
            return PIXELS
        ImageOps.exif_transpose(picture, in_place=True)
        picture.convert("RGB").save(sys.stdout.buffer, "png")
        sys.stdout.buffer.flush()
    except OSError as error:
        return FULL if error.errno in (errno.ENOSPC, errno.EDQUOT) else 1
    except Exception:  # noqa: BLE001 - whatever a decoder stumbles over, the picture is refused
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
