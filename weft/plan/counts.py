"""Loads from a mask: what its active tiles cost, by head, by row and by tile.

Counting works on the packed bits: 64 tiles are added at a time, each bit of their sums in a word of its
own, so a layer of 592 × 592 blocks and 40 heads takes milliseconds. All loads are int64.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from weft.core.codec import value
from weft.core.errors import InputError
from weft.core.indices import IntArray
from weft.core.mask import BlockMask, count_ones

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


@value
@dataclass(frozen=True)
class TileCost:
    """The integer cost of a tile: token pairs × `pair` + `tile`, the fixed cost of starting it."""

    pair: int = 1
    tile: int = 0

    def __post_init__(self) -> None:
        if min(self.pair, self.tile) < 0 or not self.pair + self.tile:
            raise InputError(
                f"TileCost(pair={self.pair}, tile={self.tile}) makes work free or less.",
                hint="Give costs of 0 or more, one of them positive; pair=0, tile=1 counts tiles.",
            )

    def of(self, rows: IntArray, cols: IntArray) -> IntArray:
        """[rows, cols]: the cost of tiles of so many query and key tokens."""
        return rows[:, None] * cols * self.pair + self.tile


PAIRS = TileCost()


def head_loads(mask: BlockMask, cost: TileCost = PAIRS) -> IntArray:
    """[heads] of the cost of all active tiles."""
    # Tiles come in four sizes: inner ones, those of the last column and the last row, and the corner.
    (inner, right), (low, corner) = cost.of(mask.row_sizes[[0, -1]], mask.col_sizes[[0, -1]])
    last = _last_column(mask)
    loads = count_ones(_words(mask.bits)) * inner
    loads += last.sum(axis=1) * (right - inner)
    loads += count_ones(mask.bits[:, -1]) * (low - inner)
    loads += last[:, -1] * (corner - low - right + inner)
    return loads[list(mask.pattern_of)]


def row_loads(mask: BlockMask, cost: TileCost = PAIRS) -> IntArray:
    """[heads, q blocks] of the cost of each row of tiles."""
    inner, right = cost.of(mask.row_sizes, mask.col_sizes[[0, -1]]).T
    loads = count_ones(mask.bits) * inner + _last_column(mask) * (right - inner)
    return loads[list(mask.pattern_of)]


def tile_loads(mask: BlockMask, groups: Sequence[Iterable[int]], cost: TileCost = PAIRS) -> IntArray:
    """[groups, q blocks, kv blocks]: the cost of each tile, summed over the heads of each group."""
    found = np.zeros((len(groups), mask.q_blocks, mask.kv_blocks), dtype=np.int64)
    words = _words(mask.bits)
    inner, last = cost.of(mask.row_sizes[[0, -1]], mask.col_sizes)
    for group, loads in zip(groups, found, strict=True):
        chosen, times = np.unique([mask.pattern_of[head] for head in group], return_counts=True)
        if not chosen.size:
            continue
        counts = _unpack(_planes([words[pattern] for pattern in chosen], times.tolist()))
        counts = counts[: mask.bits[0].size * 8].reshape(mask.q_blocks, -1)[:, : mask.kv_blocks]
        np.multiply(counts[:-1], inner, out=loads[:-1])
        np.multiply(counts[-1], last, out=loads[-1])
    return found


def _last_column(mask: BlockMask) -> IntArray:
    """[patterns, q blocks]: 1 where the last, perhaps ragged, column is active."""
    last = mask.kv_blocks - 1
    return (mask.bits[:, :, last // 8] >> np.uint8(7 - last % 8) & np.uint8(1)).astype(np.int64)


def _words(bits: Bytes) -> Words:
    """[patterns, words]: the bits of each pattern, filled up with zeros to whole words."""
    flat = bits.reshape(len(bits), -1)
    missing = -flat.shape[1] % 8
    return np.ascontiguousarray(np.pad(flat, ((0, 0), (0, missing))) if missing else flat).view(np.uint64)


def _planes(words: Sequence[Words], times: Sequence[int]) -> list[Bytes]:
    """The binary digits, lowest first, of the sums over patterns of each bit, pattern p counted times[p]."""
    planes = [
        [word for word, time in zip(words, times, strict=True) if time >> digit & 1]
        for digit in range(sum(times).bit_length())
    ]
    for digit, plane in enumerate(planes):
        # Three bits of one weight are one of this weight and one of the next; so are two.
        while len(plane) > 1:
            odd, carry = plane[-1] ^ plane[-2], plane.pop() & plane.pop()
            if plane:
                carry |= odd & plane[-1]
                odd ^= plane.pop()
            plane.append(odd)
            planes[digit + 1].append(carry)
    return [(plane[0] if plane else np.zeros_like(words[0])).view(np.uint8) for plane in planes]


def _unpack(planes: Sequence[Bytes]) -> npt.NDArray[np.integer]:
    """The numbers whose binary digits are the planes, lowest first."""
    if len(planes) > 8:  # more than a byte holds
        return (_unpack(planes[8:]).astype(np.int64) << 8) + _unpack(planes[:8])
    total = np.unpackbits(planes[-1]).view(np.uint64)
    for plane in planes[-2::-1]:
        # One byte per bit, eight to a word: doubling the word doubles each of its bytes.
        total += total
        total |= np.unpackbits(plane).view(np.uint64)
    return total.view(np.uint8)
