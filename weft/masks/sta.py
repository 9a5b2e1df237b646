"""STA masks: sliding tile windows. A cube of tokens attends to a box of cubes; tokens are in voxel order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.core.errors import InputError
from weft.core.mask import BlockMask, BoolArray
from weft.core.voxels import Extent
from weft.masks.grid import GridCells, TokenGrid
from weft.masks.synthetic import chosen_heads


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
    """Tiles attend to a `window` of tiles (t, h, w), each head to one of the set; a share `dense` to all.

    Near an edge the window is moved inside, so that all tiles attend to equally many. The sequence must be in
    the order of `grid.voxels(tile)`. The set of STA's authors for tiles of 6×8×8 is 5×3×3, 3×3×5, 1×6×10,
    5×6×1 and 5×1×10.
    """
    if not window or any(len(box) != 3 or min(box) < 1 for box in window):
        boxes = "+".join("x".join(map(str, box)) for box in window)
        raise InputError(f"window must be boxes of three sizes >= 1 in tiles, such as 3x3x3, got {boxes}.")
    cells = grid.cubes(block, tile)
    inside = [~cells.least(~_in_window(cells, tile, box)) for box in window]
    full = np.ones_like(inside[0])
    kind = np.random.default_rng(seed).integers(len(window), size=heads)
    kind[chosen_heads(heads, dense, name="dense", seed=seed)] = len(window)
    return grid.mask(np.stack([*inside, full])[kind], block)


def _in_window(cells: GridCells, tile: Extent, window: Extent) -> BoolArray:
    """Return [cells, cells]: whether the key's cube lies in the window of the query's."""
    grid = cells.grid
    first = grid.voxels(tile).order[cells.starts] - grid.prefix
    inside = np.ones((len(first), len(first)), dtype=np.bool_)
    # Text is not on the grid; its cells are always active, wherever the clip puts them.
    along = np.unravel_index(np.clip(first, 0, grid.video - 1), grid.extent)
    for at, size, side, width in zip(along, grid.extent, tile, window, strict=True):
        tiles = -(-size // side)
        start = np.clip(at // side - width // 2, 0, max(tiles - width, 0))
        inside &= (start[:, None] <= at // side) & (at // side < start[:, None] + width)
    return inside
