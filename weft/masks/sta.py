"""STA: sliding tile windows. A cube of tokens sees a box of cubes around it; tokens are in voxel order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.core.errors import InputError
from weft.core.mask import BlockMask, BoolArray
from weft.core.voxels import Extent
from weft.masks.grid import Cells, TokenGrid
from weft.masks.laws import chosen_heads


def sta_mask(
    heads: int,
    grid: TokenGrid,
    *,
    block: int = 64,
    window: Sequence[Extent] = ((3, 3, 3),),
    tile: Extent = (4, 4, 4),
    dense: float = 0.0,
    seed: int = 0,
) -> BlockMask:
    """A tile sees a `window` of tiles (t, h, w), each head one of the set; a share `dense` of heads sees all.

    Near an edge the window is pushed inside, so every tile sees equally many. The sequence must be in
    the order of `grid.voxels(tile)`. The set that STA's authors use for tiles of 6×8×8 is
    5×3×3, 3×3×5, 1×6×10, 5×6×1 and 5×1×10.
    """
    if not window or any(len(box) != 3 or min(box) < 1 for box in window):
        raise InputError(
            f"window={window} is no set of boxes.",
            hint="Give three sizes in tiles for each, such as [(3, 3, 3)].",
        )
    cells = grid.cubes(block, tile)
    inside = [~cells.least(~_sees(cells, tile, box)) for box in window]
    full = np.ones_like(inside[0])
    kind = np.random.default_rng(seed).integers(len(window), size=heads)
    kind[chosen_heads(heads, dense, name="dense", seed=seed)] = len(window)
    return grid.mask(np.stack([*inside, full])[kind], block)


def _sees(cells: Cells, tile: Extent, window: Extent) -> BoolArray:
    """[cells, cells]: whether the key's cube lies in the window of the query's."""
    grid = cells.grid
    first = grid.voxels(tile).order[cells.starts] - grid.prefix
    seen = np.ones((len(first), len(first)), dtype=np.bool_)
    # Text is no part of the grid; its cells are always seen, wherever the clip puts them.
    along = np.unravel_index(np.clip(first, 0, grid.video - 1), grid.extent)
    for at, size, side, width in zip(along, grid.extent, tile, window, strict=True):
        tiles = -(-size // side)
        start = np.clip(at // side - width // 2, 0, max(tiles - width, 0))
        seen &= (start[:, None] <= at // side) & (at // side < start[:, None] + width)
    return seen
