"""Random: each head keeps a share of its tiles by chance; some rows and columns may be left empty."""

from __future__ import annotations

import numpy as np

from weft.core.errors import InputError
from weft.core.mask import BlockMask


def random_mask(
    heads: int, q_len: int, kv_len: int, *, block: int = 64, density: float = 0.25, seed: int = 0
) -> BlockMask:
    """Tiles are drawn independently, head by head; `density` is the expected share that is kept."""
    if not 0 <= density <= 1:
        raise InputError(f"density={density} is no share.", hint="Give a number from 0 to 1.")
    rng = np.random.default_rng(seed)
    tiles = rng.random((heads, -(-q_len // block), -(-kv_len // block))) < density
    return BlockMask.from_tiles(tiles, q_len=q_len, kv_len=kv_len, block_q=block)
