"""weft-pan: a camera that pans or shakes over a random texture, with shapes moving on top.

Each patch of texture moves from frame to frame, so a model must find it again: attention becomes sparse, but
a local window does not suffice, since the camera crosses 2 to 4 tokens per frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.core.errors import InputError
from weft.video.captions import CAMERA, DIRECTIONS, SHAKING, STILL, Phrase, spell
from weft.video.scenes import STEPS, dilate, paint, unmix, wander
from weft.video.shapes import draw_shapes

DIM = 112  # the brightest texture: brighter pixels count as a white shape


@dataclass(frozen=True)
class Pan:
    """Clips by index; `patch` is a token's width in pixels, the unit of the camera's speed."""

    num_clips = None  # endless; not a field
    frames: int = 16
    size: int = 32
    patch: int = 2
    max_shapes: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.patch <= self.size // 8 or not 1 <= self.max_shapes <= 3:
            raise InputError(
                f"patch={self.patch}, max_shapes={self.max_shapes} do not fit clips of {self.size} pixels.",
                hint=f"patch must be in [1, {self.size // 8}], so that frames overlap; max_shapes in [1, 3].",
            )

    def batch(self, indices: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        """Return frames uint8 [B, T, H, W, 3] and captions of the camera and the front shape."""
        clips, captions = zip(*map(self._clip, indices), strict=True)
        return np.stack(clips), list(captions)

    def _clip(self, index: int) -> tuple[np.ndarray, str]:
        rng, motion, velocity = self._camera(index)
        shapes = draw_shapes(rng, self.max_shapes)
        path = np.concatenate([np.zeros((1, 2), int), velocity.cumsum(0)])
        path -= path.min(0)
        world = texture(rng, self.size + path.max(), longest=self.size / 2, shortest=1.5 * self.patch)
        views = np.lib.stride_tricks.sliding_window_view(world, (self.size, self.size), (0, 1))
        canvas = np.ascontiguousarray(np.moveaxis(views[path[:, 1], path[:, 0]], 1, -1))
        paint(canvas[None], [wander(shapes, self.frames, self.size, rng, radii=(0.13, 0.16))])
        return canvas, spell((Phrase("", CAMERA, motion, "over"), shapes[0]))

    def velocity(self, index: int) -> np.ndarray:
        """Return the camera's steps int [T - 1, 2] (x, y): frame[t + 1, y, x] is frame[t, y + vy, x + vx]."""
        return self._camera(index)[2]

    def _camera(self, index: int) -> tuple[np.random.Generator, str, np.ndarray]:
        rng = np.random.default_rng((self.seed, index))
        motion = str(rng.choice([*DIRECTIONS, SHAKING, SHAKING]))
        step = np.array(STEPS[str(rng.choice(DIRECTIONS)) if motion == SHAKING else motion])
        velocity = np.empty((0, 2), int)
        while len(velocity) < self.frames - 1:
            # A pan sways sideways, a shake reverses.
            pace = rng.integers(2 * self.patch, 4 * self.patch, endpoint=True)
            sway = self.patch * rng.integers(-1, 1, endpoint=True)
            velocity = np.concatenate([velocity, [step * pace + step[::-1] * sway] * rng.integers(2, 4)])
            step = -step if motion == SHAKING else step
        return rng, motion, velocity[: self.frames - 1]


def texture(rng: np.random.Generator, size: int, *, longest: float, shortest: float) -> np.ndarray:
    """Return dim, nearly gray noise uint8 [size, size, 3] with equal power in each octave."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size))
    band = (frequency >= 1 / longest) & (frequency <= 1 / shortest)
    weight = np.divide(1, frequency, out=np.zeros_like(frequency), where=band)
    noise = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((size, size))) * weight, (size, size))
    tone = np.clip(0.5 + 0.25 * noise / noise.std(), 0, 1)[..., None]
    dark, light = rng.uniform(0, 20, 3), rng.uniform(DIM - 25, DIM, 3)
    return np.round(dark + tone * (light - dark)).astype(np.uint8)


def track_camera(frames: np.ndarray) -> np.ndarray:
    """Recover the camera's steps int [T - 1, 2]: the shifts that minimize the difference between textures.

    Shapes are excluded, and at least a third of the frame must overlap.
    """
    size = frames.shape[1:3]
    ground = texture_mask(frames).astype(float)
    gray = frames.mean(-1) / 255 * ground

    def spectrum(x: np.ndarray) -> np.ndarray:
        return np.fft.rfft2(x, [2 * n for n in size])

    m, x, xx = spectrum(ground), spectrum(gray), spectrum(gray**2)
    both, cross, before, after = (
        np.fft.irfft2(a[:-1] * b[1:].conj(), [2 * n for n in size])
        for a, b in ((m, m), (x, x), (xx, m), (m, xx))
    )
    enough = both > max(1.0, both.max() / 3)
    error = np.where(enough, (before + after - 2 * cross) / np.maximum(both, 1), np.inf)
    best = np.stack(np.unravel_index(error.reshape(len(error), -1).argmin(1), error.shape[1:]), 1)
    return np.where(best >= size, best - 2 * np.array(size), best)[:, ::-1]


def camera_motion(velocity: np.ndarray) -> str:
    """Return the word for a camera's steps: a direction that nearly all of them share, shaking, or still."""
    if np.abs(velocity).max(1).mean() < 1:
        return STILL
    for direction in DIRECTIONS:
        along = velocity @ np.array(STEPS[direction])
        across = np.abs(velocity @ np.array(STEPS[direction])[::-1])
        if (along > across).mean() > 0.8:
            return direction
    return SHAKING


def texture_mask(frames: np.ndarray) -> np.ndarray:
    """Return where [T, H, W] there is texture, with no shape within a pixel."""
    return ~dilate(unmix(frames)[1] >= 0.5)
