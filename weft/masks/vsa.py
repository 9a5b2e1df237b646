"""VSA: of pooled scores, every row of blocks keeps its k best columns; tokens are in voxel order."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.core.mask import BlockMask
from weft.core.voxels import Extent
from weft.masks.grid import FloatArray, TokenGrid
from weft.masks.laws import share
from weft.masks.scores import fitting, made_up_scores, top_k


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
    """Every row keeps equally many blocks, the best by pooled score; scores are made up.

    The sequence is meant to be in the order of `grid.voxels(tile)`.
    """
    centres = grid.centres(block, grid.voxels(tile).order)
    scores = made_up_scores(heads, grid, centres, seed=seed, step=step)
    return top_k_mask(scores, grid, block=block, density=density)


def top_k_mask(
    scores: Iterable[FloatArray], grid: TokenGrid, *, block: int = 64, density: float = 0.15
) -> BlockMask:
    """From pooled q·k [heads, blocks, blocks]; text comes on top.

    k is `density` of the video's blocks, the same in every row of every head.
    """
    text = grid.text(block)
    k = max(1, round(share("density", density) * int((~text).sum())))
    kept = text[:, None] | text
    tiles = [top_k(np.where(text, -np.inf, score), k) | kept for score in fitting(scores, len(text))]
    return grid.mask(np.stack(tiles), block)
