"""Scenes: one or two colored shapes in uniform motion, as phrases of a caption and as pixels.

A caption is always true of its pixels: no shape leaves the frame, shapes joined by "and" never touch, and of
those joined by "over" the first hides part of the second in some frames and none of it in others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from weft.core.errors import InputError
from weft.video.captions import COLORS, KINDS, STILL, Phrase

PALETTE = {
    "red": (225, 30, 40),
    "orange": (255, 130, 0),
    "yellow": (250, 235, 50),
    "green": (30, 175, 60),
    "cyan": (40, 215, 230),
    "blue": (45, 85, 240),
    "purple": (165, 50, 215),
    "white": (240, 240, 240),
}
BACKGROUND = (22, 22, 26)
STEPS = {"left": (-1, 0), "right": (1, 0), "up": (0, -1), "down": (0, 1), STILL: (0, 0)}
MARGIN = 1.0  # pixels between a shape and the frame's edge


class Outline(NamedTuple):
    """A circle (no sides) or a regular polygon: the points inside all of its sides except `spare`."""

    sides: int
    spare: int
    inner: float  # distance of a side from the center, in radii
    outer: float  # distance of the farthest point


# A pentagram is where at most one of a pentagon's five lines is crossed. Areas are alike, not equal.
OUTLINES = {
    "circle": Outline(0, 0, 1.0, 1.0),
    "square": Outline(4, 0, 0.9, 0.9 * 2**0.5),
    "triangle": Outline(3, 0, 0.69, 1.38),
    "star": Outline(5, 1, 0.46, 0.46 / np.cos(np.pi * 0.4)),
}


class Sprite(NamedTuple):
    """A shape with its radius and the path [T, 2] of its center (x, y), in pixels."""

    shape: Phrase
    radius: float
    path: np.ndarray

    @property
    def reach(self) -> float:
        return self.radius * OUTLINES[self.shape.kind].outer


def blank(clips: int, frames: int, size: int) -> np.ndarray:
    """Return empty clips uint8 [B, T, H, W, 3]."""
    row = np.tile(np.array(BACKGROUND, np.uint8), (size, 1))  # whole rows copy many times faster than pixels
    return np.broadcast_to(row, (clips, frames, size, size, 3)).copy()


def place(scene: Sequence[Phrase], frames: int, size: int, rng: np.random.Generator) -> list[Sprite]:
    """Return the sprites of one shape, or of two that the first one's joint relates; the front one first."""
    if len(scene) == 1:
        return wander(scene, frames, size, rng, radii=(0.14, 0.18))
    test = _apart if scene[0].joint == "and" else _crossing
    return wander(scene, frames, size, rng, radii=(0.115, 0.145), test=test, tries=64)


def wander(
    shapes: Sequence[Phrase],
    frames: int,
    size: int,
    rng: np.random.Generator,
    *,
    radii: tuple[float, float],
    test: Callable[..., np.ndarray] | None = None,
    tries: int = 1,
) -> list[Sprite]:
    """Return sprites on random paths inside the frame; `radii` are shares of its size.

    Paths are drawn `tries` at a time until the distance of the two shapes passes the test.
    """
    if frames < 4 or size < 24:
        raise InputError(f"A scene needs >= 4 frames of >= 24 pixels, got {frames} of {size}.")
    outer = np.array([OUTLINES[shape.kind].outer for shape in shapes])
    steps = np.array([STEPS[shape.motion] for shape in shapes])
    time = np.linspace(-0.5, 0.5, frames)[:, None]
    while True:  # K tries · S shapes · T frames · 2 coordinates
        radius_KS = size * rng.uniform(*radii, (tries, len(shapes)))
        room_KS = size - 2 * (radius_KS * outer + MARGIN)
        travel_KS = np.minimum(room_KS, size * rng.uniform(0.38, 0.58, room_KS.shape))
        free_KS2 = room_KS[..., None] - np.abs(steps) * travel_KS[..., None]
        middle_KS2 = size / 2 + free_KS2 * (rng.random(free_KS2.shape) - 0.5)
        path_KST2 = middle_KS2[:, :, None] + (steps * travel_KS[..., None])[:, :, None] * time
        if test is None:
            chosen = 0
        else:
            gap_KT = np.linalg.norm(path_KST2[:, 0] - path_KST2[:, 1], axis=-1)
            good = test(gap_KT, radius_KS.sum(1, keepdims=True), (radius_KS * outer).sum(1, keepdims=True))
            if not good.any():
                continue
            chosen = good.argmax()
        return [Sprite(*each) for each in zip(shapes, radius_KS[chosen], path_KST2[chosen], strict=True)]


def _apart(gap: np.ndarray, _radii: np.ndarray, reach: np.ndarray) -> np.ndarray:
    return gap.min(1) > reach[:, 0] + MARGIN


def _crossing(gap: np.ndarray, radii: np.ndarray, reach: np.ndarray) -> np.ndarray:
    # Near enough to hide a large part of the other, and away for long enough to show all of it.
    return (gap.min(1) < 0.5 * radii[:, 0]) & ((gap > reach).mean(1) >= 0.25)


def paint(canvas: np.ndarray, clips: Sequence[Sequence[Sprite]]) -> None:
    """Draw each clip's sprites onto uint8 [B, T, H, W, 3]; the first is in front."""
    for depth in reversed(range(max(map(len, clips)))):
        for kind in KINDS:
            layer = [
                (b, c[depth]) for b, c in enumerate(clips) if len(c) > depth and c[depth].shape.kind == kind
            ]
            if layer:
                _paint_kind(canvas, kind, np.array([b for b, _ in layer]), [sprite for _, sprite in layer])


def _paint_kind(canvas: np.ndarray, kind: str, clip_N: np.ndarray, sprites: Sequence[Sprite]) -> None:
    size = canvas.shape[2]
    width = min(size, 2 * int(np.ceil(max(s.reach for s in sprites))) + 3)
    path_NT2 = np.stack([s.path for s in sprites])
    corner_NT2 = np.clip(np.round(path_NT2 - width / 2).astype(int), 0, size - width)
    offset_NT2w = (corner_NT2 - path_NT2)[..., None] + (np.arange(width) + 0.5)
    x_NTw, y_NTw = np.moveaxis(offset_NT2w.astype(np.float32), 2, 0)
    radius = np.array([s.radius for s in sprites], np.float32)[:, None, None, None]
    alpha = coverage(kind, x_NTw[:, :, None, :], y_NTw[:, :, :, None], radius)[:, :, None]
    color = np.array([PALETTE[s.shape.color] for s in sprites], np.float32)[:, None, :, None, None]
    windows = np.lib.stride_tricks.sliding_window_view(canvas, (width, width), (2, 3), writeable=True)
    at = (clip_N[:, None], np.arange(canvas.shape[1]), corner_NT2[..., 1], corner_NT2[..., 0])
    below = windows[at].astype(np.float32)
    windows[at] = np.round(below + alpha * (color - below)).astype(np.uint8)


def coverage(kind: str, x: np.ndarray, y: np.ndarray, radius: np.ndarray | float) -> np.ndarray:
    """Return how much of the pixel at (x, y) from its center a shape covers, 0 to 1."""
    outline = OUTLINES[kind]
    if not outline.sides:
        outside = np.sqrt(x * x + y * y)
    else:
        most = less = np.float32(-np.inf)  # the largest and second largest distance beyond a side
        for side in range(outline.sides):
            # The first side of a star is its upper bar, of a triangle its base: both point up.
            angle = 2 * np.pi * side / outline.sides + (-np.pi / 2 if outline.spare else np.pi / 2)
            across = x * np.float32(np.cos(angle)) + y * np.float32(np.sin(angle))
            most, less = np.maximum(most, across), np.maximum(less, np.minimum(most, across))
        outside = less if outline.spare else most
    return np.clip(0.5 + radius * np.float32(outline.inner) - outside, 0, 1)


def unmix(frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Invert `paint`: return each pixel's color (an index into COLORS) and its coverage, 0 to 1.

    A pixel is modeled as a mixture of the background and the one color that fits best, so that soft edges
    and dim shapes keep their hue; gray is a little white.
    """
    ground = np.array(BACKGROUND, np.float32)
    rays_C3 = np.array([PALETTE[color] for color in COLORS], np.float32) - ground
    length_C = (rays_C3**2).sum(1)
    dot = (frames.astype(np.float32) - ground) @ rays_C3.T
    share = np.clip(dot / length_C, 0, 1)
    color = (share * (share * length_C - 2 * dot)).argmin(-1)
    return color, np.take_along_axis(share, color[..., None], -1)[..., 0]


def dilate(x_FHW: np.ndarray) -> np.ndarray:
    """Return the maximum of each pixel and its eight neighbors."""
    wide = np.pad(x_FHW, ((0, 0), (1, 1), (1, 1)), mode="edge")
    tall = np.maximum(np.maximum(wide[:, :-2], wide[:, 1:-1]), wide[:, 2:])
    return np.maximum(np.maximum(tall[..., :-2], tall[..., 1:-1]), tall[..., 2:])
