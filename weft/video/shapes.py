"""weft-shapes: an endless generated set of captioned clips of moving colored shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from weft.core.errors import InputError
from weft.video.captions import COLORS, JOINTS, KINDS, Phrase, spell
from weft.video.scenes import STEPS, blank, paint, place


@dataclass(frozen=True)
class Shapes:
    """Clips by index; a clip depends on the seed and its index only."""

    num_clips = None  # endless; not a field
    frames: int = 16
    size: int = 64
    max_shapes: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_shapes not in (1, 2):
            raise InputError(f"max_shapes must be 1 or 2, got {self.max_shapes}.")

    def batch(self, indices: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        """Return frames uint8 [B, T, H, W, 3] and their captions."""
        captions, placed = [], []
        for index in indices:
            rng = np.random.default_rng((self.seed, index))
            scene = draw(rng, self.max_shapes)
            captions.append(spell(scene))
            placed.append(place(scene, self.frames, self.size, rng))
        canvas = blank(len(placed), self.frames, self.size)
        paint(canvas, placed)
        return canvas, captions


def draw(rng: np.random.Generator, max_shapes: int) -> tuple[Phrase, ...]:
    """Return a random scene, uniform over kinds, colors and directions."""
    first, *others = draw_shapes(rng, max_shapes)
    # Two shapes that move in the same direction never cross.
    crossing = any(shape.motion != first.motion for shape in others)
    joint = JOINTS[rng.integers(1 + crossing)]
    return replace(first, joint=joint if others else ""), *others


def draw_shapes(rng: np.random.Generator, max_shapes: int) -> tuple[Phrase, ...]:
    """Return 1 to `max_shapes` shapes of different colors."""
    colors = rng.permutation(COLORS)[: rng.integers(1, max_shapes + 1)]
    shapes = ((str(rng.choice(KINDS)), str(color), str(rng.choice(list(STEPS)))) for color in colors)
    return tuple(Phrase(color, kind, motion) for kind, color, motion in shapes)
