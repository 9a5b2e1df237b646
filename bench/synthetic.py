"""Synthetic masks for planning experiments: a made-up video over denoising steps, and PARO's orders.

They are not measured on a model; `weft.masks.trace` replays masks that were recorded from one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np

from weft.core.errors import InputError
from weft.core.mask import BlockMask, BoolArray
from weft.masks.grid import FloatArray, TokenGrid, check_share, nearest
from weft.masks.random import Floats, head_densities

SPREAD = 1.7
"""The deviation of the logit over heads. With the regions of the scores, it gives 40 heads in natural order a
mean imbalance of 1.42, 1.22, 1.18 and 1.12 on 8 × 1, 4 × 2, 2 × 4 and 1 × 8 ranks, much like real ones."""


def evolving_mask(
    heads: int,
    grid: TokenGrid,
    *,
    block: int = 64,
    density: float = 0.47,
    rho: float = 0.97,
    step: int = 0,
    seed: int = 0,
) -> BlockMask:
    """One denoising `step` of masks that drift; each step keeps `rho` of the last.

    Steps of one seed belong together; seeds tell layers or prompts apart. Heads keep their best tiles by
    score. Their densities walk around `density`: the logit is normal over heads and AR(1) over steps
    (a rho of 0.95 to 0.99 looks like real ones).
    """
    if not 0 < density < 1:
        raise InputError(f"density={density} does not evolve.", hint="Give a number between 0 and 1.")
    law = _around(density, SPREAD * drift((heads,), step=step, rho=rho, seed=[seed, 3]))
    text = grid.text(block)
    tiles = np.empty((heads, len(text), len(text)), dtype=np.bool_)
    made_up = synthetic_scores(heads, grid, grid.centers(block), seed=seed, step=step, rho=rho)
    for head, score, share in zip(tiles, made_up, law.tolist(), strict=True):
        head[:] = nearest(-score, share) | text[:, None] | text
    return grid.mask(tiles, block)


def _around(density: float, logits: Floats) -> Floats:
    """The logistic of the logits, all moved by as much as gives it this mean."""
    low, high = -50.0, 50.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _logistic(logits + middle).mean() < density else (low, middle)
    return _logistic(logits + low)


def _logistic(logits: Floats) -> Floats:
    return 1 / (1 + np.exp(-logits))


def paro_mask(
    heads: int,
    grid: TokenGrid,
    *,
    block: int = 64,
    density: float = 0.3,
    cv: float = 0.4,
    seed: int = 0,
) -> BlockMask:
    """Give each head a random order of axes and the tiles near in it; densities spread over heads by `cv`.

    Blocks are those of that order: queries, keys and values are permuted head by head. Near is near on the
    outermost axis and within the slice, out to a distance that keeps the head's density.
    """
    law = head_densities(heads, density, cv=cv, seed=seed)
    orders = tuple(permutations((0, 1, 2)))
    tiles: BoolArray = np.empty((heads, *[grid.blocks(block)] * 2), dtype=np.bool_)
    order = np.random.default_rng(seed).integers(len(orders), size=heads)
    for number, axes in enumerate(orders):
        own = turned(grid, *axes)
        cells = own.pieces(block)
        slices = np.abs(cells.frame[:, None] - cells.frame)
        distance = cells.least(slices * own.frame + cells.gap(own.frame) * own.t)
        for head in np.flatnonzero(order == number):
            tiles[head] = nearest(distance, float(law[head]))
    return grid.mask(tiles, block)


def turned(grid: TokenGrid, outer: int, middle: int, inner: int) -> TokenGrid:
    """Return the grid with its axes (0 is t, 2 is w) in this order, the outermost first."""
    size = grid.extent
    return TokenGrid(size[outer], size[middle], size[inner], grid.prefix, grid.suffix)


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
    # [queries and keys, heads + 1, waves]: [:, 0] is shared by all heads, [:, 1:] is of each head.
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
