"""Synthetic workloads for planning experiments: head densities, and block scores that drift over steps.

They are not measured on a model; `trace` replays masks recorded from a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.mask import BoolArray
from weft.masks.grid import FloatArray, TokenGrid, check_share

Floats = npt.NDArray[np.float64]


def head_densities(heads: int, density: float | Sequence[float], *, cv: float = 0.0, seed: int = 0) -> Floats:
    """Return [heads] densities: all equal, as listed, or beta-distributed with this cv (std / mean).

    >>> head_densities(3, 0.25).tolist(), head_densities(2, [0.1, 0.9]).tolist()
    ([0.25, 0.25, 0.25], [0.1, 0.9])
    """
    listed = np.atleast_1d(np.asarray(density, dtype=np.float64))
    for value in listed.tolist():
        check_share("density", value)
    if listed.size not in (1, heads):
        raise InputError(f"density must be one number or {heads}, one for each head, got {listed.size}.")
    mean = float(listed[0])
    if not cv or listed.size > 1 or mean in (0, 1):
        return np.broadcast_to(listed, heads).copy()
    # Of all distributions on [0, 1] with this mean, the one on {0, 1} has the largest cv.
    max_cv = float(np.sqrt((1 - mean) / mean))
    if not 0 <= cv < max_cv:
        raise InputError(f"cv must be in [0, {max_cv:.2f}) for density={mean}, got {cv}.")
    concentration = (1 - mean) / (mean * cv**2) - 1  # alpha + beta
    return np.random.default_rng([seed, 1]).beta(mean * concentration, (1 - mean) * concentration, heads)


def chosen_heads(heads: int, share: float, *, name: str, seed: int) -> BoolArray:
    """Return [heads]: a random choice of this share of the heads, rounded to whole heads."""
    count = round(check_share(name, share) * heads)
    chosen = np.zeros(heads, dtype=np.bool_)
    chosen[np.random.default_rng([seed, 2]).permutation(heads)[:count]] = True
    return chosen


def drift(shape: tuple[int, ...], *, step: int, rho: float, seed: Sequence[int]) -> Floats:
    """Return standard normals after `step` steps of an AR(1) process with autocorrelation rho."""
    if step < 0:
        raise InputError(f"step must be ≥ 0, got {step}.")
    check_share("rho", rho)
    rng = np.random.default_rng(seed)
    state = rng.standard_normal(shape)
    for _ in range(step):
        state = rho * state + np.sqrt(1 - rho**2) * rng.standard_normal(shape)
    return state


NEAR_WEIGHT, REGION_WEIGHT = 1.0, 0.115
"""Weights of the nearness and region terms of a score; its noise term is uniform in [0, 1)."""
WAVES = 8
"""Number of random cosine waves over the video whose weighted sum is the region term."""


def synthetic_scores(
    heads: int, grid: TokenGrid, centers: FloatArray, *, seed: int = 0, step: int = 0, rho: float = 0.97
) -> Iterator[FloatArray]:
    """Yield pooled scores [blocks, blocks], about 0 to 2, of each head of a synthetic video.

    Each head prefers blocks near in space or in time, all heads slightly prefer the same regions, and the
    rest is noise. The regions drift from one denoising step to the next. Heads are yielded one by one: the
    scores of all heads would take a gigabyte.
    """
    positions = centers / np.asarray(grid.extent, dtype=np.float32)
    rng = np.random.default_rng([seed, 4])
    waves = np.cos(2 * np.pi * (positions @ rng.standard_normal((3, WAVES)) + rng.random(WAVES)))
    # [queries and keys, heads + 1, waves]: [:, 0] is shared by all heads, [:, 1:] has one row per head.
    weights = drift((2, heads + 1, WAVES), step=step, rho=rho, seed=[seed, 6])
    biases = REGION_WEIGHT * (weights[:, 1:] + weights[:, :1]) @ waves.T / np.sqrt(WAVES)
    # A head has a short length scale along one axis (time, rows or columns) and long ones along the others.
    lengths: FloatArray = np.full((3, 3), 0.3, dtype=np.float32)
    np.fill_diagonal(lengths, 0.05)
    near = [_nearness(positions / length) for length in lengths]
    for head, (q_bias, k_bias) in enumerate(biases.swapaxes(0, 1).astype(np.float32)):
        rng = np.random.default_rng([seed, 5, head])
        score = near[rng.integers(3)] * np.float32(NEAR_WEIGHT * rng.uniform(0.5, 1.5))
        score += rng.random(score.shape, dtype=np.float32)
        score += q_bias[:, None]
        score += k_bias
        yield score


def _nearness(positions: FloatArray) -> FloatArray:
    """Return 1 / (1 + distance²) of every pair, without exp or matmul: their last bits vary by machine."""
    total = np.ones((len(positions), len(positions)), dtype=np.float32)
    for axis in positions.T:
        difference = axis[:, None] - axis
        total += np.square(difference, out=difference)
    return np.reciprocal(total, out=total)
