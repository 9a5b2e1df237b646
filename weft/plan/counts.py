"""Compute loads of a mask: the costs of its active tiles, summed by head, by row or by tile.

Tiles are counted on the packed bits, so a layer of 592 × 592 blocks and 40 heads takes milliseconds. All
loads are int64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.core.bits import count_ones, to_words
from weft.core.codec import Value
from weft.core.errors import InputError
from weft.core.indices import IntArray
from weft.core.mask import BlockMask


@dataclass(frozen=True)
class TileCost(Value):
    """The integer cost of a tile: token pairs × `pair` + `tile`, the fixed cost of starting it."""

    pair: int = 1
    tile: int = 0

    def __post_init__(self) -> None:
        if min(self.pair, self.tile) < 0 or not self.pair + self.tile:
            raise InputError(
                f"`pair` and `tile` must be >= 0, and one of them > 0, got {self.pair} and {self.tile}.",
                hint="TileCost() counts token pairs, TileCost(pair=0, tile=1) counts tiles.",
            )

    def of(self, rows: IntArray, cols: IntArray) -> IntArray:
        """[rows, cols]: the cost of tiles of so many query and key tokens."""
        return rows[:, None] * cols * self.pair + self.tile


PAIRS = TileCost()
"""The cost of a tile is its number of token pairs."""


def head_loads(mask: BlockMask, cost: TileCost = PAIRS) -> IntArray:
    """[heads]: the cost of all active tiles of each head."""
    # Tiles come in four sizes: inner ones, those of the last column and the last row, and the corner.
    (inner, right), (bottom, corner) = cost.of(mask.row_sizes[[0, -1]], mask.col_sizes[[0, -1]])
    last = _last_column(mask)
    loads = count_ones(to_words(mask.bits)) * inner
    loads += last.sum(axis=1) * (right - inner)
    loads += count_ones(mask.bits[:, -1]) * (bottom - inner)
    loads += last[:, -1] * (corner - bottom - right + inner)
    return loads[list(mask.pattern_of)]


def row_loads(mask: BlockMask, cost: TileCost = PAIRS) -> IntArray:
    """[heads, q blocks]: the cost of each row of tiles."""
    inner, right = cost.of(mask.row_sizes, mask.col_sizes[[0, -1]]).T
    loads = count_ones(mask.bits) * inner + _last_column(mask) * (right - inner)
    return loads[list(mask.pattern_of)]


def tile_loads(mask: BlockMask, groups: Sequence[Iterable[int]], cost: TileCost = PAIRS) -> IntArray:
    """[groups, q blocks, kv blocks]: the cost of each tile, summed over the heads of each group."""
    table = np.empty((len(groups), mask.q_blocks, mask.kv_blocks), dtype=np.int64)
    inner, bottom = cost.of(mask.row_sizes[[0, -1]], mask.col_sizes)
    for group, loads in zip(groups, table, strict=True):
        counts = mask.counts(group)
        np.multiply(counts[:-1], inner, out=loads[:-1])
        np.multiply(counts[-1], bottom, out=loads[-1])
    return table


def _last_column(mask: BlockMask) -> IntArray:
    """[patterns, q blocks]: 1 where the last, perhaps ragged, column is active."""
    last = mask.kv_blocks - 1
    return (mask.bits[:, :, last // 8] >> np.uint8(7 - last % 8) & np.uint8(1)).astype(np.int64)
