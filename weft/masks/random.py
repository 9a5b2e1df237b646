"""Random masks, synthetic: each head keeps a random share of its tiles; rows and columns may be empty."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.masks.grid import check_share

Floats = npt.NDArray[np.float64]


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


def head_densities(heads: int, density: float | Sequence[float], *, cv: float = 0.0, seed: int = 0) -> Floats:
    """Return [heads] densities: all equal, as listed, or beta-distributed with this cv (std / mean).

    >>> head_densities(3, 0.25).tolist(), head_densities(2, [0.1, 0.9]).tolist()
    ([0.25, 0.25, 0.25], [0.1, 0.9])
    """
    listed = np.atleast_1d(np.asarray(density, dtype=np.float64))
    for value in listed.tolist():
        check_share("density", value)
    if listed.size not in (1, heads):
        raise InputError(f"density must be one number or {heads}, one for each head, got {listed.size}.")
    mean = float(listed[0])
    if not cv or listed.size > 1 or mean in (0, 1):
        return np.broadcast_to(listed, heads).copy()
    # Of all distributions on [0, 1] with this mean, the one on {0, 1} has the largest cv.
    max_cv = float(np.sqrt((1 - mean) / mean))
    if not 0 <= cv < max_cv:
        raise InputError(f"cv must be in [0, {max_cv:.2f}) for density={mean}, got {cv}.")
    concentration = (1 - mean) / (mean * cv**2) - 1  # alpha + beta
    return np.random.default_rng([seed, 1]).beta(mean * concentration, (1 - mean) * concentration, heads)
