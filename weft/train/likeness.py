"""Likeness: how near two clips are, pixel by pixel (PSNR) and window by window (SSIM).

Clips [..., T, H, W, 3] are uint8, or floats from 0 to 1; there is one number for each clip.
"""

from __future__ import annotations

import numpy as np

from weft.core.errors import InputError

SIDE, SIGMA = 11, 1.5
WINDOW = np.exp(-0.5 * (np.arange(SIDE) - SIDE // 2) ** 2 / SIGMA**2)
WINDOW /= WINDOW.sum()
C1, C2 = 0.01**2, 0.03**2  # for a range of 1, as published (Wang et al. 2004)


def psnr(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Peak signal to noise in dB; infinite for clips that are equal."""
    a, b = _pair(a, b)
    error = ((a - b) ** 2).mean((-4, -3, -2, -1))
    with np.errstate(divide="ignore"):
        return -10 * np.log10(error)


def ssim(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Structural similarity, at most 1: the mean over frames, channels and all windows inside a frame."""
    a, b = _pair(a, b)
    if min(a.shape[-3:-1]) < SIDE:
        raise InputError(f"Frames of {a.shape[-3]}×{a.shape[-2]} pixels.", hint=f"SSIM needs {SIDE}×{SIDE}.")
    mean_a, mean_b = _smooth(a), _smooth(b)
    var_a, var_b = _smooth(a * a) - mean_a**2, _smooth(b * b) - mean_b**2
    both = _smooth(a * b) - mean_a * mean_b
    top = (2 * mean_a * mean_b + C1) * (2 * both + C2)
    return (top / ((mean_a**2 + mean_b**2 + C1) * (var_a + var_b + C2))).mean((-4, -3, -2, -1))


def _pair(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if a.shape != b.shape or a.ndim < 4:
        raise InputError(
            f"Clips of shapes {a.shape} and {b.shape}.", hint="Both have [..., frames, height, width, 3]."
        )
    x, y = (each / 255.0 if each.dtype == np.uint8 else each.astype(np.float64) for each in (a, b))
    return x, y


def _smooth(x: np.ndarray) -> np.ndarray:
    """Means of rows and columns under the window, where it fits."""
    for axis in (-3, -2):
        x = np.lib.stride_tricks.sliding_window_view(x, SIDE, axis) @ WINDOW
    return x
