"""Scenes: one or two coloured shapes that move at a steady pace, as words and as pixels.

The words are always true of the pixels: no shape leaves the frame, shapes joined by "and" never touch, and of
those joined by "over" the first hides part of the second at some time and leaves it whole at others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from weft.core.errors import InputError
from weft.models.words import COLOURS, JOINTS, KINDS, STILL, Phrase, parse, spell

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
    """A circle (no sides) or a regular polygon: the points that lie inside of all sides but `spare`."""

    sides: int
    spare: int
    inner: float  # distance of a side from the centre, in radii
    outer: float  # distance of the farthest point


# A pentagram is where at most one of a pentagon's five lines is crossed. Areas are alike, not equal.
OUTLINES = {
    "circle": Outline(0, 0, 1.0, 1.0),
    "square": Outline(4, 0, 0.9, 0.9 * 2**0.5),
    "triangle": Outline(3, 0, 0.69, 1.38),
    "star": Outline(5, 1, 0.46, 0.46 / np.cos(np.pi * 0.4)),
}


@dataclass(frozen=True)
class Shape:
    """A shape by its words: the kind, the colour, and where it goes ("still": nowhere)."""

    kind: str
    colour: str
    direction: str = STILL

    def __post_init__(self) -> None:
        for given, words in ((self.kind, KINDS), (self.colour, COLOURS), (self.direction, tuple(STEPS))):
            if given not in words:
                raise InputError(
                    f"{given!r} is not one of {', '.join(words)}.", hint="Say all three of a shape."
                )


@dataclass(frozen=True)
class Scene:
    """One or two shapes of different colours; `joint` says how the first lies to the second."""

    shapes: tuple[Shape, ...]
    joint: str = "and"

    def __post_init__(self) -> None:
        if not 1 <= len(self.shapes) <= 2 or self.joint not in JOINTS:
            raise InputError(f"{self} is not one shape, nor two joined by {' or '.join(JOINTS)}.")
        first, last = self.shapes[0], self.shapes[-1]
        if first is not last and first.colour == last.colour:
            raise InputError(f"Both shapes are {first.colour}.", hint="Give them different colours.")
        if self.joint == "over" and first.direction == last.direction:
            raise InputError(
                f"{self.caption!r}: neither would pass over the other.", hint="Move one of them."
            )

    @classmethod
    def of(cls, caption: str) -> Scene:
        """The scene that a caption describes, which must be told in full."""
        phrases = parse(caption)
        shapes = tuple(Shape(p.kind, p.colour, p.motion) for p in phrases)
        return cls(shapes, (phrases[0].joint if phrases else "") or "and")

    @property
    def caption(self) -> str:
        joints = (self.joint, "")[-len(self.shapes) :]
        told = zip(self.shapes, joints, strict=True)
        return spell([Phrase(shape.colour, shape.kind, shape.direction, joint) for shape, joint in told])


class Sprite(NamedTuple):
    """A shape in place: its radius and the path [T, 2] of its centre (x, y), in pixels."""

    shape: Shape
    radius: float
    path: np.ndarray

    @property
    def reach(self) -> float:
        return self.radius * OUTLINES[self.shape.kind].outer


def render(scene: Scene, frames: int = 16, size: int = 64, seed: int | Sequence[int] = 0) -> np.ndarray:
    """A clip uint8 [T, H, W, 3] of the scene; the seed decides places, sizes and pace."""
    canvas = blank(1, frames, size)
    paint(canvas, [place(scene, frames, size, np.random.default_rng(seed))])
    return canvas[0]


def blank(clips: int, frames: int, size: int) -> np.ndarray:
    """Empty clips uint8 [B, T, H, W, 3]."""
    row = np.tile(np.array(BACKGROUND, np.uint8), (size, 1))  # whole rows copy many times faster than pixels
    return np.broadcast_to(row, (clips, frames, size, size, 3)).copy()


def place(scene: Scene, frames: int, size: int, rng: np.random.Generator) -> list[Sprite]:
    """The scene's sprites, the front one first."""
    if len(scene.shapes) == 1:
        return wander(scene.shapes, frames, size, rng, radii=(0.14, 0.18))
    test = _apart if scene.joint == "and" else _crossing
    return wander(scene.shapes, frames, size, rng, radii=(0.115, 0.145), test=test, tries=64)


def wander(
    shapes: Sequence[Shape],
    frames: int,
    size: int,
    rng: np.random.Generator,
    *,
    radii: tuple[float, float],
    test: Callable[..., np.ndarray] | None = None,
    tries: int = 1,
) -> list[Sprite]:
    """Sprites at random places that stay in the frame; `radii` are shares of its size.

    Places are drawn `tries` at a time until the distance of the two shapes passes the test.
    """
    if frames < 4 or size < 24:
        raise InputError(f"{frames} frames of {size} pixels are no scene.", hint="Take 4 of 24 or more.")
    outer = np.array([OUTLINES[shape.kind].outer for shape in shapes])
    steps = np.array([STEPS[shape.direction] for shape in shapes])
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
    # Near enough to hide a good part of the other, and away for long enough to show it whole.
    return (gap.min(1) < 0.5 * radii[:, 0]) & ((gap > reach).mean(1) >= 0.25)


def paint(canvas: np.ndarray, clips: Sequence[Sequence[Sprite]]) -> None:
    """Draw onto uint8 [B, T, H, W, 3] each clip's sprites, of which the first is in front."""
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
    colour = np.array([PALETTE[s.shape.colour] for s in sprites], np.float32)[:, None, :, None, None]
    windows = np.lib.stride_tricks.sliding_window_view(canvas, (width, width), (2, 3), writeable=True)
    at = (clip_N[:, None], np.arange(canvas.shape[1]), corner_NT2[..., 1], corner_NT2[..., 0])
    below = windows[at].astype(np.float32)
    windows[at] = np.round(below + alpha * (colour - below)).astype(np.uint8)


def coverage(kind: str, x: np.ndarray, y: np.ndarray, radius: np.ndarray | float) -> np.ndarray:
    """How much of the pixel at (x, y) from the centre a shape covers, 0 to 1, by its distance to the edge."""
    outline = OUTLINES[kind]
    if not outline.sides:
        outside = np.sqrt(x * x + y * y)
    else:
        most = less = np.float32(-np.inf)  # the farthest and the second farthest that a side is crossed
        for side in range(outline.sides):
            # The first side of a star is its upper bar, of a triangle its base: both point up.
            angle = 2 * np.pi * side / outline.sides + (-np.pi / 2 if outline.spare else np.pi / 2)
            across = x * np.float32(np.cos(angle)) + y * np.float32(np.sin(angle))
            most, less = np.maximum(most, across), np.maximum(less, np.minimum(most, across))
        outside = less if outline.spare else most
    return np.clip(0.5 + radius * np.float32(outline.inner) - outside, 0, 1)


def unmix(frames: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of painting: each pixel's colour (an index into COLOURS) and how much it covers, 0 to 1.

    A pixel is taken for a mixture of the background and the one colour that explains it best, so that soft
    edges and dim shapes keep their hue; greys are a little white.
    """
    ground = np.array(BACKGROUND, np.float32)
    rays_C3 = np.array([PALETTE[colour] for colour in COLOURS], np.float32) - ground
    length_C = (rays_C3**2).sum(1)
    dot = (frames.astype(np.float32) - ground) @ rays_C3.T
    share = np.clip(dot / length_C, 0, 1)
    colour = (share * (share * length_C - 2 * dot)).argmin(-1)
    return colour, np.take_along_axis(share, colour[..., None], -1)[..., 0]


def spread(x_FHW: np.ndarray) -> np.ndarray:
    """The largest value of each pixel and its eight neighbours."""
    wide = np.pad(x_FHW, ((0, 0), (1, 1), (1, 1)), mode="edge")
    tall = np.maximum(np.maximum(wide[:, :-2], wide[:, 1:-1]), wide[:, 2:])
    return np.maximum(np.maximum(tall[..., :-2], tall[..., 1:-1]), tall[..., 2:])
