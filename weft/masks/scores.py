"""Scores: select blocks by pooled attention scores, the k best of each row or the fewest that hold p.

`weft.run.kernels.select` does the same on a device; here ties go to the first block on every machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from weft.core.errors import InputError
from weft.core.mask import BoolArray
from weft.masks.grid import FloatArray


def check_scores(scores: Iterable[FloatArray], blocks: int) -> Iterator[FloatArray]:
    """Yield the scores of each head; raise an InputError if they do not fit the blocks."""
    for head, score in enumerate(scores):
        if score.shape != (blocks, blocks):
            raise InputError(
                f"Scores must be [heads, {blocks}, {blocks}], got {score.shape} for head {head}."
            )
        yield score


def top_k(score: FloatArray, k: int) -> BoolArray:
    """Select the k best of each row; of equal scores the first, so that all ranks select the same."""
    worst = np.partition(score, -k, axis=1)[:, -k, None]
    active = score >= worst
    if (active.sum(axis=1) > k).any():
        better, equal = score > worst, score == worst
        active = better | equal & (equal.cumsum(axis=1) <= k - better.sum(axis=1, keepdims=True))
    return active


def top_p(score: FloatArray, p: float) -> BoolArray:
    """Select the fewest of each row whose softmax adds up to p, and all scores equal to the last one."""
    weight = np.exp(score - score.max(axis=1, keepdims=True))
    rising = np.sort(weight, axis=1)
    total = rising.cumsum(axis=1)
    # Drop as many as possible: the smallest weights whose sum is at most 1 - p.
    dropped = (total <= np.float32(1 - p) * total[:, -1:]).sum(axis=1, keepdims=True)
    return weight >= np.take_along_axis(rising, np.minimum(dropped, score.shape[1] - 1), axis=1)
