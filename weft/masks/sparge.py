"""SpargeAttn: of pooled scores, every row of blocks keeps the fewest columns that hold p of its softmax."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.core.mask import BlockMask
from weft.masks.grid import FloatArray, TokenGrid
from weft.masks.laws import share
from weft.masks.scores import fitting, made_up_scores, top_p

SHARP = 5.0
"""What the made-up scores of a typical head are multiplied with: about a fourth is kept at p = 0.9."""


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
    """Every row keeps the fewest blocks that hold `p` of its softmax; scores are made up.

    The sharper a head, the less it keeps; sharpness is log-normal over heads with this `spread`.
    """
    factors = SHARP * np.exp(spread * np.random.default_rng(seed).standard_normal(heads))
    scores = made_up_scores(heads, grid, grid.centres(block), seed=seed, step=step)
    sharp = (score * np.float32(factor) for score, factor in zip(scores, factors, strict=True))
    return top_p_mask(sharp, grid, block=block, p=p)


def top_p_mask(
    scores: Iterable[FloatArray], grid: TokenGrid, *, block: int = 64, p: float = 0.9
) -> BlockMask:
    """From pooled q·k [heads, blocks, blocks], scaled as the softmax takes them; text comes on top."""
    share("p", p)
    text = grid.text(block)
    kept = text[:, None] | text
    return grid.mask(np.stack([top_p(score, p) | kept for score in fitting(scores, len(text))]), block)
