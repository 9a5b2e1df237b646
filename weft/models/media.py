"""Media: an image, a video or a sheet of its frames, that says how it was made; whole or not at all."""

from __future__ import annotations

import json
import math
import os
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import InputError
from weft.core.files import whole

VIDEOS = (".mp4", ".gif")
SUFFIXES = {".mp4": "av", ".gif": "PIL", ".png": "PIL"}
"""What can be written, and the package that writes it."""
VISIBLE = 256
"""Videos of fewer pixels a side are enlarged."""
CROWD = 512**2
"""Pixels of a frame above which several threads encode it sooner (measured on two cores)."""
QUALITY = 92
"""Of JPEG and WebP."""
SHOWN = 16
"""Frames that a sheet has at most."""


def check_target(path: Path) -> None:
    """Refuse what could not be written, before hours are spent on it."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path} is none of {', '.join(SUFFIXES)}.", hint="The suffix says what to write.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {path.parent} for {path.name}.", hint="Give another --out.")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written.", hint="Give another --out.")


def write(path: Path, frames: np.ndarray, about: dict[str, Any], *, fps: float) -> None:
    """Frames [F, H, W, 3] from 0 to 1, of which a PNG is a sheet; `about` becomes the comment, as JSON."""
    with whole(path) as temporary:
        temporary.write_bytes(encoded(path.suffix.lower()[1:], frames, about, fps=fps))


def encoded(kind: str, frames: np.ndarray, about: dict[str, Any], *, fps: float) -> bytes:
    """The same as bytes, equal for equal frames; `kind` is mp4, gif, png, webp or jpeg."""
    pixels = np.round(np.clip(np.nan_to_num(frames), 0.0, 1.0) * 255).astype(np.uint8)
    tags = {
        "title": str(about.get("prompt", "")),
        "software": f"weft {about['versions']['weft']}",
        "comment": json.dumps(about, ensure_ascii=False),
    }
    file = BytesIO()
    if kind == "mp4":
        _mp4(file, pixels, tags, fps)
    elif kind == "gif":
        _gif(file, pixels, tags["comment"], fps)
    else:
        shown = pixels[spread(len(pixels), SHOWN)]
        columns = math.ceil(len(shown) ** 0.5)
        _image(file, kind, shown[0] if len(shown) == 1 else sheet(shown, columns=columns), tags)
    return file.getvalue()


def spread(frames: int, most: int) -> np.ndarray:
    """The numbers of at most so many frames, at even distances, with the first and the last."""
    return np.linspace(0, frames - 1, min(most, frames)).round().astype(int)


def sheet(pixels: np.ndarray, *, columns: int) -> np.ndarray:
    """Frames uint8 [F, H, W, 3] in rows, as one picture."""
    shown = enlarged(pixels, VISIBLE // 2)
    rows, gap = -(-len(shown) // columns), 4
    height, width = (size + gap for size in shown.shape[1:3])
    page = np.full((rows * height + gap, columns * width + gap, 3), 255, np.uint8)
    for i, frame in enumerate(shown):
        top, left = i // columns * height + gap, i % columns * width + gap
        page[top : top + height - gap, left : left + width - gap] = frame
    return page


def enlarged(pixels: np.ndarray, least: int) -> np.ndarray:
    """Every pixel of frames [F, H, W, …] as a square of pixels, if a side has at most half of `least`."""
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

    # One palette for all frames, since colours that change with the frame flicker.
    palette = Image.fromarray(np.concatenate(pixels)).quantize(256)
    flat = np.stack([np.asarray(Image.fromarray(frame).quantize(palette=palette)) for frame in pixels])
    pictures = [Image.fromarray(frame) for frame in enlarged(flat, VISIBLE)]
    for picture in pictures:
        picture.putpalette(palette.getpalette() or [])
    # Hundredths of a second, whose sum is right; browsers slow down what is shorter than two.
    ends = np.round(100 * np.arange(len(pixels) + 1) / fps)
    lengths = [10 * int(length) for length in np.maximum(2, np.diff(ends))]
    pictures[0].save(
        file, format="GIF", save_all=True, append_images=pictures[1:], duration=lengths, loop=0,
        comment=comment.encode(),
    )  # fmt: skip


def _mp4(file: BytesIO, pixels: np.ndarray, tags: dict[str, str], fps: float) -> None:
    import av

    # Players expect half as many pixels in colour, which would blur small videos, and an even number of them.
    pixels = enlarged(pixels, VISIBLE)
    pixels = np.pad(pixels, ((0, 0), *((0, size % 2) for size in pixels.shape[1:3]), (0, 0)), mode="edge")
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(file, "w", format="mp4") as container:
        container.metadata.update(tags)
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        stream.codec_context.colorspace = 6  # BT.601, as frames are converted; players take HD for another
        # What x264 writes depends on how many threads it has: as many everywhere, and more only where they
        # save more than they cost.
        threads = "1" if math.prod(pixels.shape[1:3]) < CROWD else "4"
        stream.options = {"crf": "17", "threads": threads} if codec == "libx264" else {"qscale": "2"}
        for picture in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
