"""Random masks, synthetic: each head keeps a random share of its tiles; rows and columns may be empty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.core.mask import BlockMask
from weft.masks.synthetic import head_densities


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
    """Draw tiles independently; `density` is the expected share of active ones, see `head_densities`."""
    law = head_densities(heads, density, cv=cv, seed=seed)
    rng = np.random.default_rng(seed)
    tiles = rng.random((heads, -(-q_len // block), -(-kv_len // block))) < law[:, None, None]
    return BlockMask.from_tiles(tiles, q_len=q_len, kv_len=kv_len, block_q=block)
