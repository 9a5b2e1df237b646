"""Scores: pooled attention scores of a made-up video, for masks that are chosen by score.

A head is drawn to what is near in space or near in time, all heads look a little more at some regions
than at others, and the rest is noise. The regions drift from one denoising step to the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from weft.core.errors import InputError
from weft.core.mask import BoolArray
from weft.masks.grid import FloatArray, TokenGrid
from weft.masks.laws import drift

NEAR, REGIONS = 1.0, 0.115
"""What nearness and regions weigh against noise between 0 and 1."""
WAVES = 8
"""How many waves over the video the regions are made of."""


def made_up_scores(
    heads: int, grid: TokenGrid, centres: FloatArray, *, seed: int = 0, step: int = 0, rho: float = 0.97
) -> Iterator[FloatArray]:
    """Head by head (all of them would fill a gigabyte): [blocks, blocks], about 0 to 2."""
    places = centres / np.asarray(grid.extent, dtype=np.float32)
    rng = np.random.default_rng([seed, 4])
    waves = np.cos(2 * np.pi * (places @ rng.standard_normal((3, WAVES)) + rng.random(WAVES)))
    # Of rows and of columns: what all heads share and what is a head's own.
    weights = drift((2, heads + 1, WAVES), step=step, rho=rho, seed=[seed, 6])
    pulls = REGIONS * (weights[:, 1:] + weights[:, :1]) @ waves.T / np.sqrt(WAVES)
    # Heads look far along two axes and near along the third: time, rows or columns.
    lengths: FloatArray = np.full((3, 3), 0.3, dtype=np.float32)
    np.fill_diagonal(lengths, 0.05)
    near = [_nearness(places / length) for length in lengths]
    for head, (q_pull, k_pull) in enumerate(pulls.swapaxes(0, 1).astype(np.float32)):
        rng = np.random.default_rng([seed, 5, head])
        score = near[rng.integers(3)] * np.float32(NEAR * rng.uniform(0.5, 1.5))
        score += rng.random(score.shape, dtype=np.float32)
        score += q_pull[:, None]
        score += k_pull
        yield score


def _nearness(places: FloatArray) -> FloatArray:
    """1 / (1 + distance²) of every two: no exp and no matrix product, whose last bits differ by machine."""
    total = np.ones((len(places), len(places)), dtype=np.float32)
    for along in places.T:
        apart = along[:, None] - along
        total += np.square(apart, out=apart)
    return np.reciprocal(total, out=total)


def fitting(scores: Iterable[FloatArray], blocks: int) -> Iterator[FloatArray]:
    """The scores, head by head, if they are of these blocks."""
    for head, score in enumerate(scores):
        if score.shape != (blocks, blocks):
            raise InputError(
                f"The scores of head {head} have the shape {score.shape}.",
                hint=f"The grid has {blocks} blocks: give [heads, {blocks}, {blocks}].",
            )
        yield score


def top_k(score: FloatArray, k: int) -> BoolArray:
    """The k best of each row; among equals the first, so that every rank keeps the same."""
    worst = np.partition(score, -k, axis=1)[:, -k, None]
    kept = score >= worst
    if (kept.sum(axis=1) > k).any():
        better, equal = score > worst, score == worst
        kept = better | equal & (equal.cumsum(axis=1) <= k - better.sum(axis=1, keepdims=True))
    return kept


def top_p(score: FloatArray, p: float) -> BoolArray:
    """The fewest of each row whose softmax adds up to p; equals of the last one stay too."""
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    rising = np.sort(weight, axis=1)
    total = rising.cumsum(axis=1)
    # The most that may go: all whose sum, from the least on, leaves p.
    gone = (total <= np.float32(1 - p) * total[:, -1:]).sum(axis=1, keepdims=True)
    return weight >= np.take_along_axis(rising, np.minimum(gone, score.shape[1] - 1), axis=1)
