"""Tiles: the part of a mask that one Attend computes, in the rows and columns of its operands."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from weft.core.mask import BlockMask, BoolArray
from weft.core.schedule import Attend


@dataclass(frozen=True, eq=False)
class Blocks:
    """The compact list of active kv blocks of every (head, q block), ascending, as int32 tensors.

    Row (head, i) has kv[starts[head · q_blocks + i] : starts[head · q_blocks + i + 1]].
    """

    heads: int
    q_blocks: int
    kv_blocks: int
    starts: Tensor
    kv: Tensor

    @staticmethod
    def of(active: BoolArray | Tensor) -> Blocks:
        """From booleans [heads, q blocks, kv blocks]."""
        tiles = torch.as_tensor(active)
        heads, q_blocks, kv_blocks = tiles.shape
        starts = torch.zeros(heads * q_blocks + 1, dtype=torch.int32, device=tiles.device)
        starts[1:] = tiles.sum(-1).flatten().cumsum(0)
        return Blocks(heads, q_blocks, kv_blocks, starts, tiles.nonzero()[:, 2].int().contiguous())

    @cached_property
    def active(self) -> Tensor:
        """The same as booleans [heads, q blocks, kv blocks]."""
        rows = torch.repeat_interleave(torch.arange(self.heads * self.q_blocks), self.starts.diff().cpu())
        tiles = torch.zeros(self.heads * self.q_blocks, self.kv_blocks, dtype=torch.bool)
        tiles[rows, self.kv.long().cpu()] = True
        return tiles.view(self.heads, self.q_blocks, self.kv_blocks)

    @cached_property
    def inverted(self) -> Blocks:
        """By kv block: the q blocks that read it. Gradients of keys need no atomic additions with it."""
        return Blocks.of(self.active.mT.contiguous()).to(self.starts.device)

    def to(self, device: torch.device) -> Blocks:
        return Blocks(self.heads, self.q_blocks, self.kv_blocks, self.starts.to(device), self.kv.to(device))


@dataclass(frozen=True, eq=False)
class Tiles:
    """Active [heads, q blocks, kv blocks] of operands made of whole blocks; only the last may be ragged.

    `active` is None where every tile is active and the operands are one dense rectangle.
    """

    active: BoolArray | None
    block_q: int
    block_k: int
    q_len: int
    kv_len: int

    @staticmethod
    def of(mask: BlockMask, op: Attend) -> Tiles:
        q_len, kv_len = op.q.tokens.size, op.kv.tokens.size
        if mask.is_dense:
            return Tiles(None, q_len, kv_len, q_len, kv_len)
        rows, cols = op.q.tokens.blocks(mask.block_q), op.kv.tokens.blocks(mask.block_k)
        active = mask.select(op.q.heads, rows, cols)
        found = None if active.all() else active
        return Tiles(found, mask.block_q, mask.block_k, q_len, kv_len)

    @cached_property
    def blocks(self) -> Blocks:
        assert self.active is not None, "a dense rectangle has no list of blocks"
        return Blocks.of(self.active)

    @cached_property
    def rows_of_work(self) -> tuple[tuple[Tensor, slice, Tensor], ...]:
        """(heads, query rows, key rows) such that those heads need exactly those keys for those rows."""
        assert self.active is not None
        found: list[tuple[Tensor, slice, Tensor]] = []
        for row in range(self.active.shape[1]):
            alike: dict[bytes, list[int]] = {}
            for head, columns in enumerate(self.active[:, row]):
                if columns.any():
                    alike.setdefault(columns.tobytes(), []).append(head)
            rows = slice(row * self.block_q, min((row + 1) * self.block_q, self.q_len))
            for heads in alike.values():
                columns = np.repeat(self.active[heads[0], row], self.block_k)[: self.kv_len]
                keys = torch.from_numpy(np.flatnonzero(columns))
                found.append((torch.tensor(heads), rows, keys))
        return tuple(found)

    @cached_property
    def token_mask(self) -> Tensor | None:
        """[heads, query rows, key rows]; only for the reference, it is as large as the scores."""
        if self.active is None:
            return None
        full = self.active.repeat(self.block_q, axis=1).repeat(self.block_k, axis=2)
        return torch.from_numpy(full[:, : self.q_len, : self.kv_len])
