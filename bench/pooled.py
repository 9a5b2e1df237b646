"""Masks by pooled scores, as VSA and SpargeAttn select blocks, of the synthetic scores of `bench.synthetic`.

`weft.run.kernels.select` selects on a device; here ties go to the first block on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from bench.synthetic import synthetic_scores
from weft.core.errors import InputError
from weft.core.mask import BlockMask, BoolArray
from weft.core.voxels import Extent
from weft.masks.grid import FloatArray, TokenGrid, check_share

SHARPNESS = 5.0
"""Factor of the synthetic scores of a typical head: about a fourth is kept at p = 0.9."""


def sparge_mask(
    heads: int,
    grid: TokenGrid,
    *,
    block: int = 64,
    p: float = 0.9,
    spread: float = 0.6,
    step: int = 0,
    seed: int = 0,
) -> BlockMask:
    """Keep the fewest blocks of each row that hold `p` of its softmax, by *synthetic* scores.

    The sharper a head, the less it keeps; sharpness is log-normal over heads with this `spread`.
    """
    factors = SHARPNESS * np.exp(spread * np.random.default_rng(seed).standard_normal(heads))
    scores = synthetic_scores(heads, grid, grid.centers(block), seed=seed, step=step)
    sharp = (score * np.float32(factor) for score, factor in zip(scores, factors, strict=True))
    return top_p_mask(sharp, grid, block=block, p=p)


def top_p_mask(
    scores: Iterable[FloatArray], grid: TokenGrid, *, block: int = 64, p: float = 0.9
) -> BlockMask:
    """Make a mask from pooled q·k [heads, blocks, blocks], scaled for the softmax; text is always active."""
    check_share("p", p)
    text = grid.text(block)
    always = text[:, None] | text
    return grid.mask(np.stack([top_p(score, p) | always for score in check_scores(scores, len(text))]), block)


def vsa_mask(
    heads: int,
    grid: TokenGrid,
    *,
    block: int = 64,
    density: float = 0.15,
    tile: Extent = (4, 4, 4),
    step: int = 0,
    seed: int = 0,
) -> BlockMask:
    """Keep equally many blocks in each row, the best by *synthetic* scores.

    The sequence must be in the order of `grid.voxels(tile)`.
    """
    places = grid.centers(block, grid.voxels(tile).order)
    scores = synthetic_scores(heads, grid, places, seed=seed, step=step)
    return top_k_mask(scores, grid, block=block, density=density)


def top_k_mask(
    scores: Iterable[FloatArray], grid: TokenGrid, *, block: int = 64, density: float = 0.15
) -> BlockMask:
    """Make a mask from pooled q·k [heads, blocks, blocks]; text is always active.

    k is `density` of the video's blocks, the same in every row of every head.
    """
    text = grid.text(block)
    k = max(1, round(check_share("density", density) * int((~text).sum())))
    always = text[:, None] | text
    tiles = [top_k(np.where(text, -np.inf, score), k) | always for score in check_scores(scores, len(text))]
    return grid.mask(np.stack(tiles), block)


def check_scores(scores: Iterable[FloatArray], blocks: int) -> Iterator[FloatArray]:
    """Yield the scores of each head; raise an InputError if they do not fit the blocks."""
    for head, score in enumerate(scores):
        if score.shape != (blocks, blocks):
            raise InputError(
                f"Scores must be [heads, {blocks}, {blocks}], got {score.shape} for head {head}."
            )
        yield score


def top_k(score: FloatArray, k: int) -> BoolArray:
    """Select the k best of each row; of equal scores the first, so that all ranks select the same."""
    worst = np.partition(score, -k, axis=1)[:, -k, None]
    active = score >= worst
    if (active.sum(axis=1) > k).any():
        better, equal = score > worst, score == worst
        active = better | equal & (equal.cumsum(axis=1) <= k - better.sum(axis=1, keepdims=True))
    return active


def top_p(score: FloatArray, p: float) -> BoolArray:
    """Select the fewest of each row whose softmax adds up to p, and all scores equal to the last one."""
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    rising = np.sort(weight, axis=1)
    total = rising.cumsum(axis=1)
    # Drop the most that may be dropped: the smallest ones whose sum leaves p.
    dropped = (total <= np.float32(1 - p) * total[:, -1:]).sum(axis=1, keepdims=True)
    return weight >= np.take_along_axis(rising, np.minimum(dropped, score.shape[1] - 1), axis=1)
