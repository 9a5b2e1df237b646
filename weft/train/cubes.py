"""Cubes: the order of tokens in which sparse attention is trained, cubes of the video before all text.

So every whole cube is a block whatever the length of the text, and the ragged edges of the video share the
last blocks with it.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from weft.core.indices import IntArray
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.voxels import Extent, Voxels
from weft.masks.grid import TokenGrid
from weft.models.sparsity import reordered
from weft.run.kernels.budget import Keep


class Cubes:
    """Of one grid: blocks of queries are cubes, blocks of keys have `block_k` tokens."""

    def __init__(self, grid: TokenGrid, cube: Extent, block_k: int | None) -> None:
        self.voxels = Voxels(grid.extent, cube, suffix=grid.tokens - grid.video)
        self.tokens, self.video, self.block = grid.tokens, grid.video, self.voxels.block
        self.block_k = block_k or self.block
        self.rows, self.cols = -(-self.tokens // self.block), -(-self.tokens // self.block_k)
        self._grid = grid
        self._layouts: dict[Layout, Layout] = {}
        self.windows: dict[tuple[int, ...], BlockMask] = {}
        """Masks of the nearest, by how many blocks each head has."""

    def layout(self, layout: Layout) -> Layout:
        """A layout of tokens, as one of their places in the order."""
        if layout not in self._layouts:
            self._layouts[layout] = reordered(layout, self.place)
        return self._layouts[layout]

    @cached_property
    def place(self) -> IntArray:
        before, video = self._grid.prefix, self.video
        place = np.empty(self.tokens, dtype=np.int64)
        place[before : before + video] = self.voxels.inverse[:video]
        place[:before] = np.arange(video, video + before)
        place[before + video :] = np.arange(video + before, self.tokens)
        return place

    @cached_property
    def keep(self) -> Keep:
        """Text, read by all and reading all, and everybody's own block."""
        return Keep.of_tokens([(self.video, self.tokens)], block_q=self.block, block_k=self.block_k)

    @cached_property
    def kept(self) -> Tensor:
        """[rows, columns] of tiles."""
        found = self.keep.tiles(slice(0, self.rows), self.rows, self.cols)
        assert found is not None
        return found

    @cached_property
    def middles(self) -> IntArray:
        """The token in the middle of each block of queries."""
        t, h, w = self.voxels.cube
        starts = np.arange(self.rows) * self.block
        middle = (t // 2 * h + h // 2) * w + w // 2
        return np.where(starts + middle < self.tokens, starts + middle, (starts + self.tokens) // 2)

    @cached_property
    def nearness(self) -> Tensor:
        """[rows, columns]: the less the further apart the centres of two blocks are."""
        plain = TokenGrid(*self._grid.extent, suffix=self.tokens - self.video)
        q, k = (
            torch.from_numpy(plain.centres(each, self.voxels.order)) for each in (self.block, self.block_k)
        )
        return -(q[:, None] - k[None]).square().sum(-1)

    def blocks(self, share: float) -> int:
        """How many blocks of keys a share of them is."""
        return min(self.cols, max(1, int(np.ceil(share * self.cols - 1e-9))))
