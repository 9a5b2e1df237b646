"""Radial masks: a static band that halves when the distance of frames doubles, and a first-frame sink."""

from __future__ import annotations

import numpy as np

from weft.core.errors import InputError
from weft.core.indices import IntArray
from weft.core.mask import BlockMask, BoolArray
from weft.masks.grid import TokenGrid


def radial_mask(
    heads: int,
    grid: TokenGrid,
    *,
    block: int = 64,
    decay: float = 0.2,
    near: float = 0.5,
    sink: int = 1,
) -> BlockMask:
    """Tokens attend to their own frame, to `near` of a frame in the next ones, then to ever less.

    All heads are equal. All tokens attend to the first `sink` frames. Wan uses decay 0.2 and near 0.5,
    HunyuanVideo 0.95 and 1.
    """
    if decay <= 0 or near < 0 or sink < 0:
        raise InputError(f"decay must be > 0, near and sink ≥ 0, got {decay}, {near} and {sink}.")
    cells = grid.pieces(block)
    reach, attends = bands(grid, block, decay, near)
    apart = np.abs(cells.frame[:, None] - cells.frame)
    apart = np.clip(apart, 0, grid.t - 1)  # text has no frame
    active = attends[apart] & (cells.gap(grid.frame) <= reach[apart])
    active |= cells.frame < sink
    return grid.mask(np.broadcast_to(~cells.least(~active), (heads, *[grid.blocks(block)] * 2)), block)


def bands(grid: TokenGrid, block: int, decay: float, near: float) -> tuple[IntArray, BoolArray]:
    """Return, for each distance in frames, how far a token attends in the frame, and whether it does at all.

    A band narrower than a block costs as much as a block: where a frame has been halved down to that, one of
    every n distances is kept, so that the density goes on halving.
    """
    apart = np.arange(grid.t)
    octave = np.frexp(apart)[1]  # the bits of the distance: 0, 1, 2, 2, 3, 3, 3, 3, 4, …
    halved = grid.frame / 2.0**octave
    reach = np.maximum(decay * halved, block).astype(np.int64)
    reach[:1] = grid.frame
    reach[1:2] = int(near * grid.frame)
    every = 2 ** np.ceil(np.log2(np.maximum(block / halved, 1))).astype(np.int64)
    return reach, (apart < 2) | (apart % every == 0)
