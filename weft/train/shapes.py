"""weft-shapes: moving coloured shapes with captions, as many as one asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.core.errors import InputError
from weft.models.words import COLOURS, JOINTS, KINDS
from weft.train.scenes import STEPS, Scene, Shape, blank, paint, place


@dataclass(frozen=True)
class Shapes:
    """Clip i of an endless set: always the same for a seed, whether asked for alone or in a batch."""

    frames: int = 16
    size: int = 64
    most: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.most not in (1, 2):
            raise InputError(f"most={self.most} shapes in a clip.", hint="A caption tells of 1 or 2.")

    def __getitem__(self, index: int) -> tuple[np.ndarray, str]:
        """Frames uint8 [T, H, W, 3] and what they show."""
        clips, [caption] = self.batch([index])
        return clips[0], caption

    def batch(self, indices: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        """Frames uint8 [B, T, H, W, 3] and their captions."""
        captions, placed = [], []
        for index in indices:
            rng = np.random.default_rng((self.seed, index))
            scene = draw(rng, self.most)
            captions.append(scene.caption)
            placed.append(place(scene, self.frames, self.size, rng))
        canvas = blank(len(placed), self.frames, self.size)
        paint(canvas, placed)
        return canvas, captions


def draw(rng: np.random.Generator, most: int) -> Scene:
    """A random scene: every word is as likely as the others of its sort."""
    shapes = draw_shapes(rng, most)
    # Two that go the same way never cross.
    crossing = len({shape.direction for shape in shapes}) == 2
    return Scene(shapes, JOINTS[rng.integers(1 + crossing)])


def draw_shapes(rng: np.random.Generator, most: int) -> tuple[Shape, ...]:
    """One to `most` shapes, no two of a colour."""
    colours = rng.permutation(COLOURS)[: rng.integers(1, most + 1)]
    return tuple(Shape(str(rng.choice(KINDS)), str(c), str(rng.choice(list(STEPS)))) for c in colours)
