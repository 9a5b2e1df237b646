"""Radial: a static band that halves whenever the distance between frames doubles, and a first-frame sink."""

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
    """Tokens see their own frame, `near` of a frame around their place in the next ones, then ever less.

    All heads are alike. `sink` first frames are seen by everyone. Wan uses decay 0.2 and near 0.5,
    HunyuanVideo 0.95 and 1.
    """
    if decay <= 0 or near < 0 or sink < 0:
        raise InputError(
            f"decay={decay}, near={near}, sink={sink}.",
            hint="Give a decay above 0, and a near and a sink of 0 or more.",
        )
    cells = grid.pieces(block)
    reach, kept = bands(grid, block, decay, near)
    apart = np.abs(cells.frame[:, None] - cells.frame)
    apart = np.clip(apart, 0, grid.t - 1)  # text has no frame
    seen = kept[apart] & (cells.gap(grid.frame) <= reach[apart])
    seen |= cells.frame < sink
    return grid.mask(np.broadcast_to(~cells.least(~seen), (heads, *[grid.blocks(block)] * 2)), block)


def bands(grid: TokenGrid, block: int, decay: float, near: float) -> tuple[IntArray, BoolArray]:
    """For each distance in frames: how far a token sees in the frame, and whether it sees it at all.

    A band narrower than a block costs as much as a block: where a whole frame has been halved down to
    that, one of every n distances is kept, so that the density goes on halving.
    """
    apart = np.arange(grid.t)
    octave = np.frexp(apart)[1]  # the bits of the distance: 0, 1, 2, 2, 3, 3, 3, 3, 4, …
    halved = grid.frame / 2.0**octave
    reach = np.maximum(decay * halved, block).astype(np.int64)
    reach[:1] = grid.frame
    reach[1:2] = int(near * grid.frame)
    every = 2 ** np.ceil(np.log2(np.maximum(block / halved, 1))).astype(np.int64)
    return reach, (apart < 2) | (apart % every == 0)
