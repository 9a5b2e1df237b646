"""Random: each head keeps a share of its tiles by chance; some rows and columns may be left empty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.core.mask import BlockMask
from weft.masks.laws import head_densities


def random_mask(
    heads: int,
    q_len: int,
    kv_len: int,
    *,
    block: int = 64,
    density: float | Sequence[float] = 0.25,
    cv: float = 0.0,
    seed: int = 0,
) -> BlockMask:
    """Tiles are drawn independently, head by head; `density` is the expected share that is kept.

    One density with a cv (deviation / mean) spreads over the heads by a beta law; a list has one for each.
    """
    law = head_densities(heads, density, cv=cv, seed=seed)
    rng = np.random.default_rng(seed)
    tiles = rng.random((heads, -(-q_len // block), -(-kv_len // block))) < law[:, None, None]
    return BlockMask.from_tiles(tiles, q_len=q_len, kv_len=kv_len, block_q=block)
