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
