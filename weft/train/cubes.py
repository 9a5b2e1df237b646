"""Cubes: the blocks of sparse attention in training, and their selection by scores and a budget per head.

The order of tokens is cubes of the video before all text. Every full cube is a block, whatever the length of
the text; the ragged edges of the video share the last blocks with it. Samples of a batch are further heads,
so that each has a mask of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.core.indices import IntArray, split_evenly
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.voxels import Extent, Voxels
from weft.masks.grid import TokenGrid
from weft.run.kernels.keep import Keep
from weft.run.kernels.select import top_k
from weft.run.world import World
from weft.sparse.mask_cache import reordered_layout
from weft.sparse.pooling import gather_tiles

Shares = npt.NDArray[np.float64]
"""Of keys, or of key blocks, by head."""
BlockScores = Callable[[int, Tensor], Tensor]
"""Of one of this rank's heads and some query blocks: [rows, key blocks]; higher is better."""


class Cubes:
    """The cubes of one grid: query blocks are cubes, key blocks have `block_k` tokens."""

    def __init__(self, grid: TokenGrid, cube: Extent, block_k: int | None) -> None:
        self.voxels = Voxels(grid.extent, cube, suffix=grid.tokens - grid.video)
        self.tokens, self.video, self.block = grid.tokens, grid.video, self.voxels.block
        self.block_k = block_k or self.block
        self.rows, self.cols = -(-self.tokens // self.block), -(-self.tokens // self.block_k)
        self._grid = grid
        self._layouts: dict[Layout, Layout] = {}
        self._windows: dict[tuple[int, ...], BlockMask] = {}
        """Masks of the nearest blocks, by each head's number of blocks."""
        self._mask_sizes = {"q_len": self.tokens, "kv_len": self.tokens, "block_q": self.block}
        self._mask_sizes["block_k"] = self.block_k

    def layout(self, layout: Layout) -> Layout:
        """Return a layout of tokens as one of their positions in this order."""
        if layout not in self._layouts:
            self._layouts[layout] = reordered_layout(layout, self.place)
        return self._layouts[layout]

    @cached_property
    def place(self) -> IntArray:
        """The position of each token in this order."""
        before, video = self._grid.prefix, self.video
        of_video, text = np.split(self.voxels.inverse, [video])
        return np.concatenate((text[:before], of_video, text[before:]))

    @cached_property
    def keep(self) -> Keep:
        """Tiles that are always selected: all of the text, and each block with itself."""
        return Keep.of_tokens([(self.video, self.tokens)], block_q=self.block, block_k=self.block_k)

    @cached_property
    def kept(self) -> Tensor:
        """The same as [rows, columns] of tiles."""
        tiles = self.keep.tiles(slice(0, self.rows), self.rows, self.cols)
        assert tiles is not None
        return tiles

    @cached_property
    def centers(self) -> IntArray:
        """The token in the middle of each query block."""
        t, h, w = self.voxels.cube
        starts = np.arange(self.rows) * self.block
        middle = (t // 2 * h + h // 2) * w + w // 2
        return np.where(starts + middle < self.tokens, starts + middle, (starts + self.tokens) // 2)

    @cached_property
    def proximity(self) -> Tensor:
        """[rows, columns]: minus the squared distance of the centers of two blocks."""
        plain = TokenGrid(*self._grid.extent, suffix=self.tokens - self.video)
        q, k = (
            torch.from_numpy(plain.centers(size, self.voxels.order)) for size in (self.block, self.block_k)
        )
        return -(q[:, None] - k[None]).square().sum(-1)

    def blocks(self, share: float) -> int:
        """Return the number of key blocks of a share of them, at least 1."""
        return min(self.cols, max(1, int(np.ceil(share * self.cols - 1e-9))))

    def select(self, scores: BlockScores, budgets: Shares, world: World, device: torch.device) -> BlockMask:
        """Keep the best tiles, a share of them for each head; the same on all ranks.

        Each rank scores some of the heads, with all tokens, and sends its selection as bits.
        """
        heads = range(*split_evenly(len(budgets), world.comm.size)[world.comm.rank])
        rows = torch.arange(self.rows, device=device)
        tiles = torch.ones(len(heads), self.rows, self.cols, dtype=torch.bool, device=device)
        for i, head in enumerate(heads):
            if (count := self.blocks(budgets[head])) < self.cols:
                tiles[i] = top_k(scores(i, rows)[None], count, keep=self.keep)[0]
        # Planning is on the host: one synchronization for all heads.
        return gather_tiles(tiles.cpu().numpy(), len(budgets), world, device).mask(**self._mask_sizes)

    def select_nearest(self, budgets: Shares) -> BlockMask:
        """Keep the tiles around each block; computed once for all steps, without communication."""
        counts = tuple(self.blocks(share) for share in budgets)
        if counts not in self._windows:
            tiles = {n: top_k(self.proximity[None], n, keep=self.keep)[0].numpy() for n in {*counts}}
            stacked = np.stack([tiles[count] for count in counts])
            self._windows[counts] = BlockMask.from_tiles(stacked, **self._mask_sizes)
        return self._windows[counts]
