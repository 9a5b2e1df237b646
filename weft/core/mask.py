"""BlockMask: the tiles of the attention matrix that are computed, per head, on the global token grid.

Blocks are cut from the whole sequence, never from a rank's shard, and the true length is kept, so
that a ragged last block has no padded keys and shards may begin anywhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.core.bits import add_up, count_ones, to_words
from weft.core.codec import Value
from weft.core.errors import InputError
from weft.core.indices import Indices, IntArray

BoolArray = npt.NDArray[np.bool_]
HeadRuns = tuple[tuple[int, int, bool], ...]
"""(first, end, whether all their tiles are active)."""
MAX_HEAD_RUNS = 8


@dataclass(frozen=True, eq=False, repr=False)
class BlockMask(Value):
    """Active tiles as packed bits; heads with equal patterns share one (`pattern_of[head]`).

    >>> BlockMask.dense(12, 4096)
    BlockMask(12 heads (1 patterns), 4096×4096 tokens, blocks 4096×4096, 100.0% active)
    >>> lower = np.tri(4, dtype=bool)[None].repeat(2, axis=0)  # [heads, q blocks, kv blocks]
    >>> mask = BlockMask.from_tiles(lower, q_len=250, kv_len=250, block_q=64)
    >>> mask.tiles[0, 1].tolist(), round(mask.density, 3)
    ([True, True, False, False], 0.625)
    """

    q_len: int
    kv_len: int
    block_q: int
    block_k: int
    pattern_of: tuple[int, ...]
    bits: npt.NDArray[np.uint8]
    """[patterns, q blocks, ⌈kv blocks / 8⌉], most significant bit first."""

    def __post_init__(self) -> None:
        _check_sizes(self.q_len, self.kv_len, self.block_q, self.block_k)
        expected = (self.q_blocks, -(-self.kv_blocks // 8))
        if self.bits.ndim != 3 or self.bits.shape[1:] != expected or self.bits.dtype != np.uint8:
            raise InputError(
                f"Mask bits must be uint8 [patterns, *{expected}], got {self.bits.dtype} of shape "
                f"{self.bits.shape}."
            )
        if not self.pattern_of or max(self.pattern_of) >= len(self.bits) or min(self.pattern_of) < 0:
            raise InputError(f"pattern_of={self.pattern_of} does not name {len(self.bits)} patterns.")
        self.bits.setflags(write=False)

    @staticmethod
    def from_tiles(
        tiles: npt.ArrayLike, *, q_len: int, kv_len: int, block_q: int, block_k: int | None = None
    ) -> BlockMask:
        """Pack booleans [heads, q blocks, kv blocks]; equal heads share one pattern."""
        block_k = block_q if block_k is None else block_k
        _check_sizes(q_len, kv_len, block_q, block_k)
        array = np.asarray(tiles, dtype=bool)
        expected = (-(-q_len // block_q), -(-kv_len // block_k))
        if array.ndim != 3 or array.shape[1:] != expected:
            raise InputError(
                f"Tiles of shape {array.shape} do not fit {q_len} × {kv_len} tokens in blocks of "
                f"{block_q} × {block_k}.",
                hint=f"Expected [heads, {expected[0]}, {expected[1]}].",
            )
        packed = np.packbits(array, axis=2)
        if len({row.tobytes() for row in packed[:, expected[0] // 2]}) == len(packed):
            # All differ in one row already: masks that change are built often, and their heads differ.
            return BlockMask(q_len, kv_len, block_q, block_k, tuple(range(len(packed))), packed)
        numbers: dict[bytes, int] = {}
        pattern_of = tuple([numbers.setdefault(head.tobytes(), len(numbers)) for head in packed])
        first = [pattern_of.index(pattern) for pattern in range(len(numbers))]
        return BlockMask(q_len, kv_len, block_q, block_k, pattern_of, packed[first])

    @staticmethod
    def dense(heads: int, q_len: int, kv_len: int | None = None, *, block: int | None = None) -> BlockMask:
        """Return a mask of active tiles only; without `block` one tile, which shards may cut anywhere."""
        kv_len = q_len if kv_len is None else kv_len
        block_q, block_k = (q_len, kv_len) if block is None else (block, block)
        _check_sizes(q_len, kv_len, block_q, block_k)
        one = np.ones((1, -(-q_len // block_q), -(-kv_len // block_k)), dtype=bool)
        return BlockMask(q_len, kv_len, block_q, block_k, (0,) * heads, np.packbits(one, axis=2))

    @property
    def heads(self) -> int:
        return len(self.pattern_of)

    def keep_on_device(self, tiles: Any) -> None:
        """Keep the booleans [heads, q blocks, kv blocks] on the device where kernels read them."""
        object.__setattr__(self, "_on_device", tiles)

    @property
    def on_device(self) -> Any:
        return vars(self).get("_on_device")

    @property
    def q_blocks(self) -> int:
        return -(-self.q_len // self.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_len // self.block_k)

    @cached_property
    def patterns(self) -> BoolArray:
        """[patterns, q blocks, kv blocks] as booleans."""
        return np.unpackbits(self.bits, axis=2, count=self.kv_blocks).view(np.bool_)

    @property
    def tiles(self) -> BoolArray:
        """[heads, q blocks, kv blocks] as booleans; large for many heads, see `select`."""
        return self.patterns[list(self.pattern_of)]

    def select(self, heads: Indices, rows: Indices, cols: Indices) -> BoolArray:
        """Return the tiles of some heads, q *blocks* and kv *blocks*."""
        patterns = np.asarray(self.pattern_of)[heads.array]
        # Select rows as packed bits, an eighth of the bytes; the columns of most pieces are contiguous.
        packed = self.bits[patterns].take(rows.array, axis=1)
        tiles = np.unpackbits(packed, axis=2, count=self.kv_blocks).view(np.bool_)
        if len(cols.runs) == 1:
            return tiles[:, :, slice(*cols.runs[0])]
        return tiles.take(cols.array, axis=2)

    @cached_property
    def is_dense(self) -> bool:
        return int(count_ones(to_words(self.bits)).sum()) == len(self.bits) * self.q_blocks * self.kv_blocks

    def head_runs(self, heads: Indices) -> HeadRuns:
        """Split some heads, by position, into runs with all tiles active and other runs.

        A GPU has faster kernels for the former. Too many runs for calls of their own, or heads that do not
        differ, are one run.
        """
        full = self._full[np.asarray(self.pattern_of)[heads.array]]
        edges = [0, *(np.flatnonzero(np.diff(full)) + 1).tolist(), len(full)]
        if not 3 <= len(edges) <= MAX_HEAD_RUNS + 1:
            return ((0, len(full), False),)
        return tuple((a, b, bool(full[a])) for a, b in pairwise(edges))

    @cached_property
    def _full(self) -> BoolArray:
        """By pattern, whether all tiles are active."""
        full = count_ones(self.bits[:, 0]) == self.kv_blocks
        # Of most masks the first row decides: their other rows need not be counted.
        full[full] = count_ones(self.bits[full]).sum(axis=1) == self.q_blocks * self.kv_blocks
        return full

    @property
    def units(self) -> tuple[int, int]:
        """Query and key tokens that must not be cut: a block, or one token where the mask is dense."""
        return (1, 1) if self.is_dense else (self.block_q, self.block_k)

    def counts(self, heads: Iterable[int]) -> npt.NDArray[np.integer]:
        """Return in how many of some heads each tile is active: [q blocks, kv blocks], small integers."""
        patterns, times = np.unique([self.pattern_of[head] for head in heads], return_counts=True)
        if not patterns.size:
            return np.zeros((self.q_blocks, self.kv_blocks), dtype=np.uint8)
        counts = add_up(list(to_words(self.bits[patterns])), times.tolist())
        return counts[: self.bits[0].size * 8].reshape(self.q_blocks, -1)[:, : self.kv_blocks]

    def needed(self, heads: Indices, q_tokens: Indices) -> BoolArray:
        """Return which kv blocks some heads of some query tokens touch: [kv blocks]."""
        patterns = np.unique(np.asarray(self.pattern_of)[heads.array])
        return self._touched(patterns[None], q_tokens)[0]

    def needed_by_head(self, heads: Indices, q_tokens: Indices) -> BoolArray:
        """Return the same for each head: [heads, kv blocks]."""
        return self._touched(np.asarray(self.pattern_of)[heads.array, None], q_tokens)

    def _touched(self, patterns: IntArray, q_tokens: Indices) -> BoolArray:
        """[sets, kv blocks] of patterns [sets, patterns of each]."""
        rows = patterns[:, :, None] * self.q_blocks + q_tokens.blocks(self.block_q).array
        packed = self.bits.reshape(-1, self.bits.shape[2]).take(rows.reshape(len(rows), -1), axis=0)
        touched = np.bitwise_or.reduce(packed, axis=1)
        return np.unpackbits(touched, axis=1, count=self.kv_blocks).view(np.bool_)

    def columns(self, blocks: BoolArray) -> Indices:
        """Return the key/value tokens of the blocks that are True."""
        bordered = np.zeros(blocks.size + 2, dtype=np.bool_)
        bordered[1:-1] = blocks
        edges = np.flatnonzero(bordered[1:] != bordered[:-1])
        ends: list[int] = np.minimum(edges * self.block_k, self.kv_len).tolist()
        return Indices(tuple(zip(ends[::2], ends[1::2], strict=True)))

    @cached_property
    def row_sizes(self) -> IntArray:
        """Tokens in each q block; only the last may be ragged."""
        return _sizes(self.q_len, self.block_q)

    @cached_property
    def col_sizes(self) -> IntArray:
        return _sizes(self.kv_len, self.block_k)

    @property
    def density(self) -> float:
        """Active share of the token pairs."""
        per_pattern = np.einsum("pqk,q,k->p", self.patterns, self.row_sizes, self.col_sizes)
        return float(per_pattern[list(self.pattern_of)].mean() / (self.q_len * self.kv_len))

    def __and__(self, other: BlockMask) -> BlockMask:
        return self._combine(other, np.logical_and)

    def __or__(self, other: BlockMask) -> BlockMask:
        return self._combine(other, np.logical_or)

    def _combine(self, other: BlockMask, combine: Callable[..., BoolArray]) -> BlockMask:
        if self.grid != other.grid:
            raise InputError(
                f"Masks must have equal heads, lengths and blocks to be combined, got {self} and {other}."
            )
        return BlockMask.from_tiles(
            combine(self.tiles, other.tiles),
            q_len=self.q_len,
            kv_len=self.kv_len,
            block_q=self.block_q,
            block_k=self.block_k,
        )

    @property
    def grid(self) -> tuple[int, int, int, int, int]:
        return self.heads, self.q_len, self.kv_len, self.block_q, self.block_k

    @cached_property
    def digest(self) -> str:
        # Hash the raw bytes: encoding a large mask as text would take longer than the hash.
        state = hashlib.sha256(repr((self.grid, self.pattern_of)).encode())
        state.update(np.ascontiguousarray(self.bits).data)
        return state.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BlockMask) or type(self) is not type(other):
            return False
        heads = self.grid == other.grid and self.pattern_of == other.pattern_of
        return heads and self.bits.tobytes() == other.bits.tobytes()

    def __hash__(self) -> int:
        return hash(self.digest)

    def __bool__(self) -> bool:
        raise InputError("A BlockMask has no truth value.", hint="Use mask.is_dense or mask.density.")

    def __repr__(self) -> str:
        patterns = f" ({len(self.bits)} patterns)" if len(self.bits) < self.heads else ""
        return (
            f"BlockMask({self.heads} heads{patterns}, {self.q_len}×{self.kv_len} tokens, "
            f"blocks {self.block_q}×{self.block_k}, {self.density:.1%} active)"
        )


@dataclass(frozen=True, eq=False, repr=False)
class AnyMask(BlockMask):
    """A stand-in for all masks on a grid: a schedule for it computes each of them.

    All keys go where any mask might read them, so it is for masks that change, not for static ones.
    """

    @staticmethod
    def like(mask: BlockMask) -> AnyMask:
        one = np.ones((1, mask.q_blocks, mask.kv_blocks), dtype=bool)
        sizes = mask.q_len, mask.kv_len, mask.block_q, mask.block_k
        return AnyMask(*sizes, (0,) * mask.heads, np.packbits(one, axis=2))

    @property
    def is_dense(self) -> bool:  # type: ignore[override] - blocks stay whole, and kernels are those of sparse tiles
        return False

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(repr(("any", self.grid)).encode()).hexdigest()[:16]


def _check_sizes(q_len: int, kv_len: int, block_q: int, block_k: int) -> None:
    if min(q_len, kv_len, block_q, block_k) < 1:
        raise InputError(
            f"Lengths and blocks must be ≥ 1, got {q_len} × {kv_len} tokens, blocks of {block_q} × {block_k}."
        )


def _sizes(length: int, block: int) -> IntArray:
    sizes = np.full(-(-length // block), block, dtype=np.int64)
    sizes[-1] = length - block * (len(sizes) - 1)
    return sizes
