"""Media files: images, videos and sheets of frames, with metadata of how they were generated."""

from __future__ import annotations

import json
import math
import os
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from weft.core.errors import InputError
from weft.core.files import check_writable, whole

if TYPE_CHECKING:
    from weft.generate.pretrained import Kwargs

VIDEOS = (".mp4", ".gif")
SUFFIXES = {".mp4": "av", ".gif": "PIL", ".png": "PIL"}
"""Supported files, and the package that writes each."""
MIN_VISIBLE_SIDE = 256
"""Videos with fewer pixels a side are enlarged."""
THREADED_PIXELS = 512**2
"""Pixels of a frame above which several threads encode it faster (measured on two cores)."""
QUALITY = 92
"""Of JPEG and WebP."""
MAX_SHEET_FRAMES = 16


def check_target(path: Path) -> None:
    """Refuse a file that could not be written, before hours are spent on it."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(
            f"{path} must end in one of {', '.join(SUFFIXES)}.", hint="The suffix is the format."
        )
    check_writable(path, hint="Give another --out.")
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written.", hint="Give another --out.")


def write(path: Path, frames: np.ndarray, metadata: Kwargs, *, fps: float) -> None:
    """Frames [F, H, W, 3] from 0 to 1, as a sheet if it is a PNG; `metadata` becomes the comment, as JSON."""
    with whole(path) as temporary:
        temporary.write_bytes(encoded(path.suffix.lower()[1:], frames, metadata, fps=fps))


def encoded(kind: str, frames: np.ndarray, metadata: Kwargs, *, fps: float) -> bytes:
    """Return the bytes of a file, deterministically; `kind` is mp4, gif, png, webp or jpeg."""
    pixels = np.round(np.clip(np.nan_to_num(frames), 0.0, 1.0) * 255).astype(np.uint8)
    tags = {
        "title": str(metadata.get("prompt", "")),
        "software": f"weft {metadata['versions']['weft']}",
        "comment": json.dumps(metadata, ensure_ascii=False),
    }
    file = BytesIO()
    if kind == "mp4":
        _mp4(file, pixels, tags, fps)
    elif kind == "gif":
        _gif(file, pixels, tags["comment"], fps)
    else:
        shown = pixels[spread(len(pixels), MAX_SHEET_FRAMES)]
        columns = math.ceil(len(shown) ** 0.5)
        _image(file, kind, shown[0] if len(shown) == 1 else sheet(shown, columns=columns), tags)
    return file.getvalue()


def spread(frames: int, most: int) -> np.ndarray:
    """Return the indices of at most `most` frames, evenly spaced, with the first and the last."""
    return np.linspace(0, frames - 1, min(most, frames)).round().astype(int)


def sheet(pixels: np.ndarray, *, columns: int) -> np.ndarray:
    """Arrange frames uint8 [F, H, W, 3] in rows of one image."""
    shown = enlarged(pixels, MIN_VISIBLE_SIDE // 2)
    rows, gap = -(-len(shown) // columns), 4
    height, width = (size + gap for size in shown.shape[1:3])
    page = np.full((rows * height + gap, columns * width + gap, 3), 255, np.uint8)
    for i, frame in enumerate(shown):
        top, left = i // columns * height + gap, i % columns * width + gap
        page[top : top + height - gap, left : left + width - gap] = frame
    return page


def enlarged(pixels: np.ndarray, least: int) -> np.ndarray:
    """Repeat the pixels of frames [F, H, W, …] until the shorter side has about `least`."""
    times = max(1, least // min(pixels.shape[1:3]))
    return pixels.repeat(times, 1).repeat(times, 2)


def _image(file: BytesIO, kind: str, pixels: np.ndarray, tags: dict[str, str]) -> None:
    from PIL import Image, PngImagePlugin

    if kind == "png":
        text = PngImagePlugin.PngInfo()
        for name, value in tags.items():
            text.add_itxt(name.capitalize(), value)  # the keywords of the PNG standard
        Image.fromarray(pixels).save(file, format="PNG", pnginfo=text)
        return
    exif = Image.Exif()
    exif[0x010E], exif[0x0131] = tags["comment"], tags["software"]  # ImageDescription, Software
    Image.fromarray(pixels).save(file, format=kind, quality=QUALITY, exif=exif)


def _gif(file: BytesIO, pixels: np.ndarray, comment: str, fps: float) -> None:
    from PIL import Image

    # One palette for all frames: a palette per frame flickers.
    palette = Image.fromarray(np.concatenate(pixels)).quantize(256)
    flat = np.stack([np.asarray(Image.fromarray(frame).quantize(palette=palette)) for frame in pixels])
    pictures = [Image.fromarray(frame) for frame in enlarged(flat, MIN_VISIBLE_SIDE)]
    for picture in pictures:
        picture.putpalette(palette.getpalette() or [])
    # In hundredths of a second, rounded without drift; browsers slow down frames shorter than two.
    ends = np.round(100 * np.arange(len(pixels) + 1) / fps)
    lengths = [10 * int(length) for length in np.maximum(2, np.diff(ends))]
    pictures[0].save(
        file, format="GIF", save_all=True, append_images=pictures[1:], duration=lengths, loop=0,
        comment=comment.encode(),
    )  # fmt: skip


def _mp4(file: BytesIO, pixels: np.ndarray, tags: dict[str, str], fps: float) -> None:
    import av

    # Players expect yuv420p: even sides, and half the resolution in color, which would blur small videos.
    pixels = enlarged(pixels, MIN_VISIBLE_SIDE)
    pixels = np.pad(pixels, ((0, 0), *((0, size % 2) for size in pixels.shape[1:3]), (0, 0)), mode="edge")
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(file, "w", format="mp4") as container:
        container.metadata.update(tags)
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.colorspace = 6  # BT.601, as converted; players assume BT.709 for HD
        # The bytes of x264 depend on its number of threads: fixed by size, several only where faster.
        threads = "1" if math.prod(pixels.shape[1:3]) < THREADED_PIXELS else "4"
        stream.options = {"crf": "17", "threads": threads} if codec == "libx264" else {"qscale": "2"}
        for picture in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
