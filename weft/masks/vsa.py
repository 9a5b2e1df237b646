"""VSA masks: each row of blocks keeps its k best columns by pooled score; tokens are in voxel order."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from weft.core.mask import BlockMask
from weft.core.voxels import Extent
from weft.masks.grid import FloatArray, TokenGrid, check_share
from weft.masks.scores import check_scores, top_k
from weft.masks.synthetic import synthetic_scores


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
    centers = grid.centers(block, grid.voxels(tile).order)
    scores = synthetic_scores(heads, grid, centers, seed=seed, step=step)
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
