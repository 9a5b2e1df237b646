"""SpargeAttn masks: each row of blocks keeps the fewest columns that hold p of its pooled softmax."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.core.mask import BlockMask
from weft.masks.grid import FloatArray, TokenGrid, check_share
from weft.masks.scores import check_scores, top_p
from weft.masks.synthetic import synthetic_scores

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
