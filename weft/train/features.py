"""Features: a fixed random convolutional net that tells sets of clips apart, with nothing to download.

    frechet(features(made), features(real))

Its weights are drawn from the raw bits of a generator, whose stream never changes, so a distance means the
same on any machine. It is a Fréchet distance on random features. It is not FVD, whose features are trained:
compare it between models of one data set, not with numbers from papers. It is biased upwards where clips are
few, so compare equal counts, of at least some times FEATURES clips, and put two sets of real clips beside it.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import InputError

SEED = 9
CHANNELS = (16, 16, 16)
STRIDES = ((1, 1, 1), (1, 2, 2), (2, 2, 2))
FEATURES = sum(CHANNELS)
FAINT = 1e-3  # weaker answers than this are alike


@torch.no_grad()
def features(clips: np.ndarray, *, batch: int = 32) -> np.ndarray:
    """[N, FEATURES] of clips [N, T, H, W, 3], uint8 or floats from 0 to 1.

    How strongly each filter answers on average, as a logarithm, at three scales; filters reach over three
    frames, so what moves differently answers differently.
    """
    if clips.ndim != 5 or clips.shape[-1] != 3 or not len(clips):
        raise InputError(f"Clips of shape {clips.shape}.", hint="They have [N, frames, height, width, 3].")
    top = 255.0 if clips.dtype == np.uint8 else 1.0
    parts: list[np.ndarray] = []
    for start in range(0, len(clips), batch):
        x = torch.from_numpy(np.moveaxis(clips[start : start + batch], -1, 1) / top).float() * 2 - 1
        answers: list[Tensor] = []
        for weight, stride in zip(_weights(), STRIDES, strict=True):
            x = F.conv3d(x, weight, stride=stride, padding=1).relu_()
            answers.append(x.mean((2, 3, 4)).add(FAINT).log())
        parts.append(torch.cat(answers, 1).double().numpy())
    return np.concatenate(parts)


@cache
def _weights() -> tuple[Tensor, ...]:
    bits, made, before = np.random.PCG64(SEED), [], 3
    for channels in CHANNELS:
        shape = channels, before, 3, 3, 3
        raw = bits.random_raw(int(np.prod(shape))).reshape(shape) >> np.uint64(11)
        uniform = raw * 2.0**-52 - 1
        uniform -= uniform.mean((1, 2, 3, 4), keepdims=True)  # it answers to change, not to light
        made.append(torch.from_numpy((uniform * (6 / (27 * before)) ** 0.5).astype(np.float32)))
        before = channels
    return tuple(made)


def frechet(a: np.ndarray, b: np.ndarray) -> float:
    """The Fréchet distance, squared, of two sets of features [N, D], each taken for a normal distribution."""
    if min(len(a), len(b)) < 2:
        raise InputError(f"Sets of {len(a)} and {len(b)} clips have no spread.", hint="Take 50 or more.")
    (mean_a, cov_a), (mean_b, cov_b) = ((x.mean(0), np.cov(x, rowvar=False)) for x in (a, b))
    # The trace of (cov_a cov_b)^½, as singular values: rounding makes none of them negative or complex.
    shared = np.linalg.norm(_root(cov_a) @ _root(cov_b), "nuc")
    return max(0.0, float(((mean_a - mean_b) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * shared))


def _root(cov: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(cov)
    return (vectors * np.sqrt(values.clip(0))) @ vectors.T
