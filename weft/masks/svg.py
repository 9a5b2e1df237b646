"""SVG masks: a head is spatial (a band around the diagonal) or temporal (the same place in all frames).

Which heads are of which kind is synthetic.
"""

from __future__ import annotations

import numpy as np

from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid, check_share, nearest
from weft.masks.synthetic import chosen_heads


def svg_mask(
    heads: int,
    grid: TokenGrid,
    *,
    block: int = 64,
    density: float = 0.25,
    spatial: float = 0.5,
    seed: int = 0,
) -> BlockMask:
    """A share `spatial` of heads sees tokens near in raster order, the others those near in the frame.

    The bands are as wide as needed for each head to keep `density` of its tiles. In a frame of few blocks,
    a temporal band may keep more.
    """
    check_share("density", density)
    cells = grid.pieces(block)
    kinds = [nearest(cells.least(cells.gap(period)), density) for period in (grid.frame, grid.tokens)]
    kind = chosen_heads(heads, spatial, name="spatial", seed=seed).astype(np.int64)
    return grid.mask(np.stack(kinds)[kind], block)
