"""TokenGrid: the (t, h, w) tokens of a video between its text, and their blocks.

Geometric masks are rules for pairs of tokens; a tile is active if any pair in it is. That is computed
exactly, without a token matrix: tokens are grouped into *cells*, runs on which the rule is simple (a piece
of one frame, a piece of one cube), and every block is a run of whole cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.core.codec import Value
from weft.core.errors import InputError
from weft.core.indices import IntArray
from weft.core.mask import BlockMask, BoolArray
from weft.core.voxels import Extent, Voxels

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class TokenGrid(Value):
    """A video of t × h × w tokens, with `prefix` text tokens before and `suffix` after it.

    Any sizes: blocks are cut from the whole sequence, may mix text, frames and cubes, and the last one
    may be ragged. Text is never masked: a tile with a text token in its rows or columns is active.

    >>> grid = TokenGrid(3, 5, 7, prefix=4)
    >>> grid.tokens, grid.blocks(16)
    (109, 7)
    """

    t: int
    h: int
    w: int
    prefix: int = 0
    suffix: int = 0

    def __post_init__(self) -> None:
        self.voxels((1, 1, 1))  # checks the sizes

    @staticmethod
    def of(size: TokenGrid | Sequence[int], *, prefix: int = 0, suffix: int = 0) -> TokenGrid:
        """Return the grid of (t, h, w); a grid is itself."""
        if isinstance(size, TokenGrid):
            return size
        if len(size) != 3 or not all(isinstance(each, int) for each in size):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InputError(f"grid={size!r} must be (t, h, w), three integers.")
        return TokenGrid(*size, prefix=prefix, suffix=suffix)

    @property
    def extent(self) -> Extent:
        return self.t, self.h, self.w

    @property
    def frame(self) -> int:
        """Tokens of a frame."""
        return self.h * self.w

    @property
    def video(self) -> int:
        return self.t * self.frame

    @property
    def tokens(self) -> int:
        return self.prefix + self.video + self.suffix

    def blocks(self, block: int) -> int:
        """Return the number of blocks of the sequence."""
        if block < 1:
            raise InputError(f"block must be ≥ 1 token, got {block}.")
        return -(-self.tokens // block)

    def voxels(self, cube: Extent) -> Voxels:
        """Return the order of the tokens in which cubes are runs."""
        return Voxels(self.extent, cube, self.prefix, self.suffix)

    def turned(self, outer: int, middle: int, inner: int) -> TokenGrid:
        """Return the grid with its axes (0 is t, 2 is w) in this order, the outermost first."""
        size = self.extent
        return TokenGrid(size[outer], size[middle], size[inner], self.prefix, self.suffix)

    def text(self, block: int) -> BoolArray:
        """Return which blocks contain a text token."""
        start = np.arange(self.blocks(block)) * block
        return (start < self.prefix) | (start + block > self.tokens - self.suffix) & bool(self.suffix)

    def centers(self, block: int, order: IntArray | None = None) -> FloatArray:
        """Return [blocks, 3]: the mean (t, h, w) of each block's video tokens, or the middle of the video.

        Places hold tokens in raster order, or token order[i] at place i as in `Voxels.order`.
        """
        places = np.arange(self.tokens) if order is None else order
        here = np.flatnonzero((places >= self.prefix) & (places < self.tokens - self.suffix))
        centers = np.empty((self.blocks(block), 3), dtype=np.float32)
        count = np.bincount(here // block, minlength=len(centers))
        for axis, along in enumerate(np.unravel_index(places[here] - self.prefix, self.extent)):
            total = np.bincount(here // block, weights=along, minlength=len(centers))
            centers[:, axis] = np.where(count, total / np.maximum(count, 1), (self.extent[axis] - 1) / 2)
        return centers

    def pieces(self, block: int) -> GridCells:
        """Return cells in raster order: each is a piece of one frame (or of the text) in one block."""
        return self._cells(block, self.prefix + np.arange(self.t + 1) * self.frame)

    def cubes(self, block: int, cube: Extent) -> GridCells:
        """Return cells in voxel order: each is a piece of one cube (or of the text) in one block."""
        return self._cells(block, self.voxels(cube).bounds)

    def _cells(self, block: int, borders: IntArray) -> GridCells:
        firsts = np.arange(self.blocks(block)) * block
        starts = np.union1d(firsts, borders[borders < self.tokens])
        return GridCells(self, starts, np.searchsorted(starts, firsts))

    def mask(self, tiles: BoolArray, block: int) -> BlockMask:
        """Return the mask of booleans [heads, blocks, blocks]."""
        return BlockMask.from_tiles(tiles, q_len=self.tokens, kv_len=self.tokens, block_q=block)


@dataclass(frozen=True, eq=False)
class GridCells:
    """Runs of places, each in one block, and their distances."""

    grid: TokenGrid
    starts: IntArray
    firsts: IntArray
    """The first cell of each block."""

    @cached_property
    def text(self) -> BoolArray:
        return (self.starts < self.grid.prefix) | (self.starts >= self.grid.tokens - self.grid.suffix)

    @property
    def frame(self) -> IntArray:
        """The frame of each cell (meaningless for text)."""
        return (self.starts - self.grid.prefix) // self.grid.frame

    def gap(self, period: int) -> IntArray:
        """Return [cells, cells]: the minimum distance modulo `period`, 0 where they overlap.

        No cell may span a multiple of the period; cells never span frames.
        """
        low = (self.starts - self.grid.prefix) % period
        high = low + np.diff(self.starts, append=self.grid.tokens) - 1
        return np.maximum(np.maximum(low[None] - high[:, None], low[:, None] - high[None]), 0)

    def least(self, distance: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return [blocks, blocks]: the least distance of two cells in the tile; 0 (False) if one is text."""
        distance = np.where(self.text[:, None] | self.text, distance.dtype.type(0), distance)
        rows = np.minimum.reduceat(distance, self.firsts, axis=0)
        return np.minimum.reduceat(rows, self.firsts, axis=1)


def nearest(distance: npt.NDArray[Any], density: float) -> BoolArray:
    """Return the tiles within the least distance that keeps at least the share `density` of them."""
    last = min(max(int(np.ceil(density * distance.size)), 1), distance.size) - 1
    return distance <= np.partition(distance, last, axis=None)[last]


def check_share(name: str, share: float) -> float:
    """Return a share; raise an InputError if it is not in [0, 1]."""
    if not 0 <= share <= 1:
        raise InputError(f"{name} must be in [0, 1], got {share}.")
    return share
