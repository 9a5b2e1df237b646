"""weft-pan: a camera that pans or shakes over a random texture, with shapes that move on top.

Every patch of texture is somewhere else in each frame, so a model must find it again: attention gets sparse,
and a window of near tokens is no substitute, since the camera crosses 2 to 4 tokens a frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from weft.core.errors import InputError
from weft.models.words import CAMERA, DIRECTIONS, SHAKING, STILL, Phrase, spell
from weft.train.scenes import STEPS, paint, spread, unmix, wander
from weft.train.shapes import draw_shapes

DIM = 112  # no texture is brighter: from there on a pixel counts as a white shape


@dataclass(frozen=True)
class Pan:
    """Clip i of an endless set; `patch` is a token's width in pixels, which the camera's pace is told in."""

    frames: int = 16
    size: int = 32
    patch: int = 2
    most: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.patch <= self.size // 8 or not 1 <= self.most <= 3:
            raise InputError(
                f"patch={self.patch} and most={self.most} of clips of {self.size} pixels.",
                hint=f"A patch is 1 to {self.size // 8}, so that frames overlap; of shapes there are 1 to 3.",
            )

    def __getitem__(self, index: int) -> tuple[np.ndarray, str]:
        """Frames uint8 [T, H, W, 3] and what they show: the camera, and the shape that is in front."""
        rng, motion, velocity = self._camera(index)
        shapes = draw_shapes(rng, self.most)
        way = np.concatenate([np.zeros((1, 2), int), velocity.cumsum(0)])
        way -= way.min(0)
        world = texture(rng, self.size + way.max(), longest=self.size / 2, shortest=1.5 * self.patch)
        views = np.lib.stride_tricks.sliding_window_view(world, (self.size, self.size), (0, 1))
        canvas = np.ascontiguousarray(np.moveaxis(views[way[:, 1], way[:, 0]], 1, -1))
        paint(canvas[None], [wander(shapes, self.frames, self.size, rng, radii=(0.13, 0.16))])
        front = shapes[0]
        told = (Phrase("", CAMERA, motion, "over"), Phrase(front.colour, front.kind, front.direction))
        return canvas, spell(told)

    def batch(self, indices: Sequence[int]) -> tuple[np.ndarray, list[str]]:
        """Frames uint8 [B, T, H, W, 3] and their captions."""
        clips, captions = zip(*(self[index] for index in indices), strict=True)
        return np.stack(clips), list(captions)

    def velocity(self, index: int) -> np.ndarray:
        """The camera's true steps int [T - 1, 2] (x, y): frame[t + 1, y, x] is frame[t, y + vy, x + vx]."""
        return self._camera(index)[2]

    def _camera(self, index: int) -> tuple[np.random.Generator, str, np.ndarray]:
        rng = np.random.default_rng((self.seed, index))
        motion = str(rng.choice([*DIRECTIONS, SHAKING, SHAKING]))
        step = np.array(STEPS[str(rng.choice(DIRECTIONS)) if motion == SHAKING else motion])
        velocity = np.empty((0, 2), int)
        while len(velocity) < self.frames - 1:
            # A pan sways to its sides, a shake turns back.
            pace = rng.integers(2 * self.patch, 4 * self.patch, endpoint=True)
            sway = self.patch * rng.integers(-1, 1, endpoint=True)
            velocity = np.concatenate([velocity, [step * pace + step[::-1] * sway] * rng.integers(2, 4)])
            step = -step if motion == SHAKING else step
        return rng, motion, velocity[: self.frames - 1]


def texture(rng: np.random.Generator, size: int, *, longest: float, shortest: float) -> np.ndarray:
    """Dim, hardly coloured noise uint8 [size, size, 3] of some octaves, all equally strong."""
    frequency = np.hypot(np.fft.fftfreq(size)[:, None], np.fft.rfftfreq(size))
    band = (frequency >= 1 / longest) & (frequency <= 1 / shortest)
    weight = np.divide(1, frequency, out=np.zeros_like(frequency), where=band)
    noise = np.fft.irfft2(np.fft.rfft2(rng.standard_normal((size, size))) * weight, (size, size))
    tone = np.clip(0.5 + 0.25 * noise / noise.std(), 0, 1)[..., None]
    dark, light = rng.uniform(0, 20, 3), rng.uniform(DIM - 25, DIM, 3)
    return np.round(dark + tone * (light - dark)).astype(np.uint8)


def follow(frames: np.ndarray) -> np.ndarray:
    """The camera's steps int [T - 1, 2], recovered: the shifts at which the next texture differs least.

    Shapes are left out of the comparison, and at least a third of the frame must overlap.
    """
    size = frames.shape[1:3]
    ground = _ground(frames).astype(float)
    grey = frames.mean(-1) / 255 * ground

    def spectrum(x: np.ndarray) -> np.ndarray:
        return np.fft.rfft2(x, [2 * n for n in size])

    m, x, xx = spectrum(ground), spectrum(grey), spectrum(grey**2)
    both, cross, before, after = (
        np.fft.irfft2(a[:-1] * b[1:].conj(), [2 * n for n in size])
        for a, b in ((m, m), (x, x), (xx, m), (m, xx))
    )
    enough = both > max(1.0, both.max() / 3)
    error = np.where(enough, (before + after - 2 * cross) / np.maximum(both, 1), np.inf)
    best = np.stack(np.unravel_index(error.reshape(len(error), -1).argmin(1), error.shape[1:]), 1)
    return np.where(best >= size, best - 2 * np.array(size), best)[:, ::-1]


def steadiness(frames: np.ndarray, velocity: np.ndarray) -> float:
    """PSNR in dB of each frame's texture against the one before it, warped by the camera's steps."""
    shown = _ground(frames)
    height, width = frames.shape[1:3]
    errors = []
    for t, (vx, vy) in enumerate(velocity):
        now = (slice(max(0, -vy), height - max(0, vy)), slice(max(0, -vx), width - max(0, vx)))
        then = (slice(max(0, vy), height + min(0, vy)), slice(max(0, vx), width + min(0, vx)))
        both = shown[t + 1][now] & shown[t][then]
        errors.append((frames[t + 1][now][both] / 255.0 - frames[t][then][both] / 255.0) ** 2)
    error = np.concatenate(errors)
    return float(-10 * np.log10(max(error.mean(), 1e-10))) if error.size else float("nan")


def told_motion(velocity: np.ndarray) -> str:
    """The word for a camera's steps: a direction that nearly all of them share, shaking, or still."""
    if np.abs(velocity).max(1).mean() < 1:
        return STILL
    for direction in DIRECTIONS:
        along = velocity @ np.array(STEPS[direction])
        across = np.abs(velocity @ np.array(STEPS[direction])[::-1])
        if (along > across).mean() > 0.8:
            return direction
    return SHAKING


def _ground(frames: np.ndarray) -> np.ndarray:
    """Where [T, H, W] there is texture, and no shape within a pixel."""
    return ~spread(unmix(frames)[1] >= 0.5)
