"""Media: a PNG or MP4 that says how it was made, written whole or not at all."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from weft.core.errors import InputError
from weft.core.files import whole

SUFFIXES = {".mp4": "a video", ".png": "an image"}


def check_target(path: Path) -> None:
    """Refuse what could not be written, before hours are spent on it."""
    if path.suffix.lower() not in SUFFIXES:
        raise InputError(f"{path} is neither .mp4 nor .png.", hint="The suffix says what to write.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {path.parent} for {path.name}.", hint="Give another --out.")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise InputError(f"{path} cannot be written.", hint="Give another --out.")


def write(path: Path, frames: np.ndarray, about: dict[str, Any], *, fps: float) -> None:
    """Frames [F, H, W, 3] from 0 to 1, of a PNG the first; `about` becomes the file's comment, as JSON."""
    pixels = np.round(np.clip(np.nan_to_num(frames), 0.0, 1.0) * 255).astype(np.uint8)
    tags = {
        "title": str(about.get("prompt", "")),
        "software": f"weft {about['versions']['weft']}",
        "comment": json.dumps(about, ensure_ascii=False),
    }
    with whole(path) as temporary:
        if path.suffix.lower() == ".png":
            _png(temporary, pixels[0], tags)
        else:
            _mp4(temporary, pixels, tags, fps)


def _png(path: Path, pixels: np.ndarray, tags: dict[str, str]) -> None:
    from PIL import Image, PngImagePlugin

    text = PngImagePlugin.PngInfo()
    for name, value in tags.items():
        text.add_itxt(name.capitalize(), value)  # the keywords of the PNG standard
    Image.fromarray(pixels).save(path, format="PNG", pnginfo=text)


def _mp4(path: Path, pixels: np.ndarray, tags: dict[str, str], fps: float) -> None:
    import av

    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    with av.open(str(path), "w", format="mp4") as container:
        container.metadata.update(tags)
        stream: Any = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = pixels.shape[1:3]  # even, as every VAE's are
        stream.pix_fmt = "yuv420p"
        stream.options = {"crf": "17"} if codec == "libx264" else {"qscale": "2"}
        for picture in pixels:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
