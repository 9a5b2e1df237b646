"""Evolving: masks of a made-up video over denoising steps, each much like the one before."""

from __future__ import annotations

import numpy as np

from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid, nearest
from weft.masks.synthetic import Floats, drift, synthetic_scores

SPREAD = 1.7
"""The deviation of the logit over heads. With the regions of the scores, it gives 40 heads in natural order a
mean imbalance of 1.42, 1.22, 1.18 and 1.12 on 8 × 1, 4 × 2, 2 × 4 and 1 × 8 ranks, much like real ones."""


def evolving_mask(
    heads: int,
    grid: TokenGrid,
    *,
    block: int = 64,
    density: float = 0.47,
    rho: float = 0.97,
    step: int = 0,
    seed: int = 0,
) -> BlockMask:
    """Return the mask of one denoising `step`; masks drift, with autocorrelation `rho`.

    Steps of one seed form one sequence; use different seeds for layers or prompts. Heads keep their best
    tiles by score. Their densities vary around `density`: the logit is normal over heads and AR(1) over steps
    (a rho of 0.95 to 0.99 resembles real ones).
    """
    if not 0 < density < 1:
        raise InputError(f"density must be in (0, 1) for an evolving mask, got {density}.")
    law = _around(density, SPREAD * drift((heads,), step=step, rho=rho, seed=[seed, 3]))
    text = grid.text(block)
    tiles = np.empty((heads, len(text), len(text)), dtype=np.bool_)
    made_up = synthetic_scores(heads, grid, grid.centers(block), seed=seed, step=step, rho=rho)
    for head, score, share in zip(tiles, made_up, law.tolist(), strict=True):
        head[:] = nearest(-score, share) | text[:, None] | text
    return grid.mask(tiles, block)


def _around(density: float, logits: Floats) -> Floats:
    """Return the logistic of the logits, shifted by a constant so that its mean is `density`."""
    low, high = -50.0, 50.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _logistic(logits + middle).mean() < density else (low, middle)
    return _logistic(logits + low)


def _logistic(logits: Floats) -> Floats:
    return 1 / (1 + np.exp(-logits))
