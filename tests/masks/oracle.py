"""Masks the slow way: a rule asked for every pair of tokens, and a tile that has any pair of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
from hypothesis import strategies as st

from weft.core.mask import BoolArray
from weft.masks.grid import TokenGrid

Place = tuple[int, int, int]
Rule = Callable[[Place, Place], bool]

grids = st.builds(
    TokenGrid, st.integers(1, 5), st.integers(1, 4), st.integers(1, 5), st.integers(0, 6), st.integers(0, 6)
)
blocks = st.sampled_from([1, 2, 3, 5, 7, 8, 16, 64])


def places(grid: TokenGrid) -> list[Place | None]:
    """The coordinates of every token of the sequence; text has none."""
    video: list[Place | None] = list(product(range(grid.t), range(grid.h), range(grid.w)))
    return [None] * grid.prefix + video + [None] * grid.suffix


def tiles(sequence: Sequence[Place | None], block: int, rule: Rule) -> BoolArray:
    """[blocks, blocks]: whether any token pair of the tile is text or fits the rule."""
    cut = [sequence[start : start + block] for start in range(0, len(sequence), block)]
    found = np.zeros((len(cut), len(cut)), dtype=bool)
    for row, col in np.ndindex(*found.shape):
        found[row, col] = any(q is None or k is None or rule(q, k) for q in cut[row] for k in cut[col])
    return found
