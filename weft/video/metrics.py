"""Metrics of generated clips: PSNR and SSIM against a counterpart, Fréchet distance between two sets.

PSNR and SSIM take clips [..., T, H, W, 3], uint8 or floats from 0 to 1, and return one number per clip.

    frechet(features(generated), features(real))

The features are those of a fixed random convolutional net: nothing to download, and a distance means the same
on any machine, since the weights come from the raw bits of a generator whose stream never changes. It is not
FVD, whose features are trained: compare models of one data set, not with numbers from papers. The distance is
biased upwards for few clips: compare equal counts, several times FEATURES, beside two sets of real clips.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import InputError

SIDE, SIGMA = 11, 1.5
WINDOW = np.exp(-0.5 * (np.arange(SIDE) - SIDE // 2) ** 2 / SIGMA**2)
WINDOW /= WINDOW.sum()
C1, C2 = 0.01**2, 0.03**2  # for a range of 1, as published (Wang et al. 2004)
SEED = 9
CHANNELS = (16, 16, 16)
STRIDES = ((1, 1, 1), (1, 2, 2), (2, 2, 2))
FEATURES = sum(CHANNELS)
LOG_EPSILON = 1e-3


def psnr(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the peak signal-to-noise ratio in dB; infinite for equal clips."""
    a, b = _as_floats(a, b)
    mse = ((a - b) ** 2).mean((-4, -3, -2, -1))
    with np.errstate(divide="ignore"):
        return -10 * np.log10(mse)


def ssim(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the structural similarity, the mean over frames, channels and all windows inside a frame."""
    a, b = _as_floats(a, b)
    if min(a.shape[-3:-1]) < SIDE:
        raise InputError(f"SSIM needs frames >= {SIDE}×{SIDE} pixels, got {a.shape[-3]}×{a.shape[-2]}.")
    mean_a, mean_b = _windowed_mean(a), _windowed_mean(b)
    var_a, var_b = _windowed_mean(a * a) - mean_a**2, _windowed_mean(b * b) - mean_b**2
    covariance = _windowed_mean(a * b) - mean_a * mean_b
    numerator = (2 * mean_a * mean_b + C1) * (2 * covariance + C2)
    return (numerator / ((mean_a**2 + mean_b**2 + C1) * (var_a + var_b + C2))).mean((-4, -3, -2, -1))


def _as_floats(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if a.shape != b.shape or a.ndim < 4:
        raise InputError(
            f"Both clips must be [..., frames, height, width, 3], got {list(a.shape)} and {list(b.shape)}."
        )
    x, y = (clip / 255.0 if clip.dtype == np.uint8 else clip.astype(np.float64) for clip in (a, b))
    return x, y


def _windowed_mean(x: np.ndarray) -> np.ndarray:
    for axis in (-3, -2):
        x = np.lib.stride_tricks.sliding_window_view(x, SIDE, axis) @ WINDOW
    return x


@torch.no_grad()
def features(clips: np.ndarray, *, batch: int = 32) -> np.ndarray:
    """Return features [N, FEATURES] of clips [N, T, H, W, 3], uint8 or floats from 0 to 1.

    They are logarithms of the mean response of each filter, at three scales. Filters span three frames, so
    they respond to motion.
    """
    if clips.ndim != 5 or clips.shape[-1] != 3 or not len(clips):
        raise InputError(f"Clips must be [N, frames, height, width, 3], got {list(clips.shape)}.")
    maximum = 255.0 if clips.dtype == np.uint8 else 1.0
    batches: list[np.ndarray] = []
    for start in range(0, len(clips), batch):
        x = torch.from_numpy(np.moveaxis(clips[start : start + batch], -1, 1) / maximum).float() * 2 - 1
        responses: list[Tensor] = []
        for weight, stride in zip(_weights(), STRIDES, strict=True):
            x = F.conv3d(x, weight, stride=stride, padding=1).relu_()
            responses.append(x.mean((2, 3, 4)).add(LOG_EPSILON).log())
        batches.append(torch.cat(responses, 1).double().numpy())
    return np.concatenate(batches)


@cache
def _weights() -> tuple[Tensor, ...]:
    bits, weights, before = np.random.PCG64(SEED), [], 3
    for channels in CHANNELS:
        shape = channels, before, 3, 3, 3
        raw = bits.random_raw(int(np.prod(shape))).reshape(shape) >> np.uint64(11)
        uniform = raw * 2.0**-52 - 1
        uniform -= uniform.mean((1, 2, 3, 4), keepdims=True)  # respond to change, not to brightness
        weights.append(torch.from_numpy((uniform * (6 / (27 * before)) ** 0.5).astype(np.float32)))
        before = channels
    return tuple(weights)


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """Return the squared Fréchet distance of two sets of features [N, D], as of normal distributions."""
    if min(len(a), len(b)) < 2:
        raise InputError(f"A Fréchet distance needs >= 2 clips per set, got {len(a)} and {len(b)}.")
    (mean_a, cov_a), (mean_b, cov_b) = ((x.mean(0), np.cov(x, rowvar=False)) for x in (a, b))
    # The trace of (cov_a cov_b)^½ by singular values, which rounding makes neither negative nor complex.
    shared = np.linalg.norm(_sqrt(cov_a) @ _sqrt(cov_b), "nuc")
    return max(0.0, float(((mean_a - mean_b) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * shared))


def _sqrt(cov: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(cov)
    return (vectors * np.sqrt(values.clip(0))) @ vectors.T
