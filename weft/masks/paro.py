"""PARO masks: each head orders the grid so that what it attends to is adjacent, then keeps static blocks.

Orders and densities of heads are synthetic.
"""

from __future__ import annotations

from itertools import permutations

import numpy as np

from weft.core.mask import BlockMask, BoolArray
from weft.masks.grid import TokenGrid, nearest
from weft.masks.synthetic import head_densities


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
        turned = grid.turned(*axes)
        cells = turned.pieces(block)
        slices = np.abs(cells.frame[:, None] - cells.frame)
        distance = cells.least(slices * turned.frame + cells.gap(turned.frame) * turned.t)
        for head in np.flatnonzero(order == number):
            tiles[head] = nearest(distance, float(law[head]))
    return grid.mask(tiles, block)
