"""Variants: a picture or a sheet of pictures that stands for a result, made when first asked for."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from weft.core.files import whole

VARIANTS = ("thumbnail", "spritesheet")
SIDE = 256
"""Pixels of the longer side of a picture."""
SHEET = 16
"""Pictures of a sheet at most, four in a row."""


def variant_of(path: Path, variant: str) -> Path | bytes:
    """The WebP next to the result; only its bytes, if it cannot be written there."""
    # Hidden: the disk counts it nowhere, and a new start of the server sweeps it away.
    made = path.with_name(f".{variant}.webp")
    if not made.is_file():
        picture = _sheet(_pictures(path, SHEET)) if variant == "spritesheet" else _pictures(path, 1)[0]
        data = io.BytesIO()
        picture.save(data, "webp")
        try:
            with whole(made) as temporary:  # also for two who ask at once
                temporary.write_bytes(data.getvalue())
        except OSError:  # as on a full disk
            return data.getvalue()
    return made


def _pictures(path: Path, most: int) -> list[Any]:
    """At most so many pictures of a result, evenly spread; one is that of the middle."""
    from PIL import Image

    if path.suffix != ".mp4":
        chosen = [Image.open(path).convert("RGB")]
    else:
        import av

        with av.open(str(path)) as file:
            # Only these become pictures: all of a long video would be gigabytes.
            wanted = _spread(file.streams.video[0].frames, most)
            chosen = [frame.to_image() for at, frame in enumerate(file.decode(video=0)) if at in wanted]
    for picture in chosen:
        picture.thumbnail((SIDE, SIDE))
    return chosen


def _spread(count: int, most: int) -> set[int]:
    return {(2 * i + 1) * count // (2 * most) for i in range(most)} if count > most else set(range(count))


def _sheet(pictures: list[Any]) -> Any:
    from PIL import Image

    width, height = pictures[0].size
    across = min(4, len(pictures))
    sheet = Image.new("RGB", (across * width, -(-len(pictures) // across) * height))
    for index, picture in enumerate(pictures):
        sheet.paste(picture, (index % across * width, index // across * height))
    return sheet
