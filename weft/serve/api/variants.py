"""Variants: thumbnails and sprite sheets of results, made on the first request."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from weft.core.files import whole

if TYPE_CHECKING:
    from PIL import Image

VARIANTS = ("thumbnail", "spritesheet")
MAX_SIDE_PIXELS = 256
"""Of one picture."""
MAX_SHEET_PICTURES = 16
SHEET_COLUMNS = 4


def variant_of(path: Path, variant: str) -> Path | bytes:
    """Return the WebP beside the result, or its bytes if it cannot be written there."""
    # Hidden: it is not counted against the quota, and the next start of the server removes it.
    cached = path.with_name(f".{variant}.webp")
    if not cached.is_file():
        is_sheet = variant == "spritesheet"
        picture = _sheet(_pictures(path, MAX_SHEET_PICTURES)) if is_sheet else _pictures(path, 1)[0]
        data = io.BytesIO()
        picture.save(data, "webp")
        try:
            with whole(cached) as temporary:  # concurrent requests write the same file
                temporary.write_bytes(data.getvalue())
        except OSError:  # as on a full disk
            return data.getvalue()
    return cached


def _pictures(path: Path, count: int) -> list[Image.Image]:
    """Return at most `count` pictures of a result, evenly spread; a single one is the middle."""
    from PIL import Image

    if path.suffix != ".mp4":
        pictures = [Image.open(path).convert("RGB")]
    else:
        import av

        with av.open(str(path)) as file:
            # Only these become pictures: all of a long video would be gigabytes.
            total = file.streams.video[0].frames
            indices = (
                {(2 * i + 1) * total // (2 * count) for i in range(count)} if total > count else range(total)
            )
            pictures = [frame.to_image() for i, frame in enumerate(file.decode(video=0)) if i in indices]
    for picture in pictures:
        picture.thumbnail((MAX_SIDE_PIXELS, MAX_SIDE_PIXELS))
    return pictures


def _sheet(pictures: list[Image.Image]) -> Image.Image:
    from PIL import Image

    width, height = pictures[0].size
    columns = min(SHEET_COLUMNS, len(pictures))
    sheet = Image.new("RGB", (columns * width, -(-len(pictures) // columns) * height))
    for index, picture in enumerate(pictures):
        sheet.paste(picture, (index % columns * width, index // columns * height))
    return sheet
