"""Decodes one picture from stdin to a PNG on stdout, as a process that can be spared.

`python -I decode.py FORMAT PIXELS MEMORY SECONDS`, which imports nothing of weft; exits with 3 if it has too
many pixels, with 1 if it is broken. What a decoder can be made to do by its input is bounded by the kernel.
"""

from __future__ import annotations

import io
import resource
import sys

PIXELS = 3
"""The exit code for a picture with too many of them."""


def main(given: list[str]) -> int:
    sort, pixels, memory, seconds = given[0], *map(int, given[1:])
    from PIL import Image, ImageOps, PngImagePlugin  # before the limits: Python itself is not to be judged

    Image.preinit()
    for bound, most in (
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NPROC, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(bound, (most, most))
    # Compressed text in a PNG is a bomb that no count of pixels shows.
    PngImagePlugin.MAX_TEXT_MEMORY = PngImagePlugin.MAX_TEXT_CHUNK = 2**20
    Image.MAX_IMAGE_PIXELS = None  # judged here, before anything is decoded
    try:
        picture = Image.open(io.BytesIO(sys.stdin.buffer.read()), formats=[sort])
        if picture.width * picture.height > pixels:
            return PIXELS
        upright = ImageOps.exif_transpose(picture).convert("RGB")
        out = io.BytesIO()
        upright.save(out, "png")
    except Exception:  # noqa: BLE001 - whatever a decoder stumbles over, the picture is refused
        return 1
    sys.stdout.buffer.write(out.getvalue())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
