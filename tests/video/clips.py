"""Clips of captions and of data sets, one at a time."""

from __future__ import annotations

import numpy as np

from weft.video.captions import parse
from weft.video.dataset import ClipSource
from weft.video.scenes import blank, paint, place


def render(caption: str, frames: int = 16, size: int = 64, seed: int = 0) -> np.ndarray:
    """Return a clip uint8 [T, H, W, 3]; the seed decides positions, sizes and speed."""
    canvas = blank(1, frames, size)
    paint(canvas, [place(parse(caption), frames, size, np.random.default_rng(seed))])
    return canvas[0]


def clip_of(source: ClipSource, index: int) -> tuple[np.ndarray, str]:
    clips, [caption] = source.batch([index])
    return clips[0], caption
