"""Problem and Switch: the sizes of an attention, and of a tensor whose sharded dim changes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

from weft.core.codec import Value
from weft.core.errors import InputError
from weft.core.indices import Indices
from weft.core.layout import Layout

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

MAX_ELEMENTS = 1 << 48
"""Bytes of many transfers are added up in 64 bits."""


def check_dtype(name: str) -> None:
    if name not in ITEM_BYTES:
        raise InputError(f"dtype {name!r} is not supported.", hint=f"Use one of {', '.join(ITEM_BYTES)}.")


class _WithDtype(Value):
    """A dtype, with the bytes of an element and of an element of a sum."""

    dtype: str

    @cached_property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def sum_bytes(self) -> int:
        """Bytes of one element of what is summed over ranks: float32 or better."""
        return max(4, self.item_bytes)


@dataclass(frozen=True, kw_only=True)
class Problem(_WithDtype):
    """Sizes, dtype, and the home layout of the query and of the key/value tokens.

    >>> tokens = Layout.even(2047, 5)
    >>> Problem(batch=1, heads=6, kv_heads=3, head_dim=64, q=tokens, kv=tokens)
    Problem(batch 1, 6/3 heads × 64, 2047 tokens over 5 ranks, float32)
    """

    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    q: Layout
    kv: Layout
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be ≥ 1, got {getattr(self, name)}.")
        if self.heads % self.kv_heads:
            near = [n for n in range(1, min(self.heads, 1024) + 1) if self.heads % n == 0]
            raise InputError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly.",
                hint=f"kv_heads must be one of {near}.",
            )
        if self.q.ranks != self.kv.ranks:
            raise InputError(
                "The layouts of queries and of keys and values must have the same number of ranks, "
                f"got {self.q.ranks} and {self.kv.ranks}."
            )
        check_dtype(self.dtype)
        elements = self.batch * self.heads * self.head_dim * max(self.q.size, self.kv.size)
        if elements > MAX_ELEMENTS:
            raise InputError(
                f"batch={self.batch:,}, heads={self.heads:,} and head_dim={self.head_dim:,} are too large.",
                hint=f"A tensor has at most {MAX_ELEMENTS:,} elements.",
            )

    def __repr__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        tokens = f"{self.q.size}" if self.q == self.kv else f"{self.q.size}×{self.kv.size}"
        return (
            f"Problem(batch {self.batch}, {heads} heads × {self.head_dim}, {tokens} tokens over "
            f"{self.ranks} ranks, {self.dtype})"
        )

    @cached_property
    def ranks(self) -> int:
        return self.q.ranks

    @cached_property
    def row_elements(self) -> int:
        """Elements of a tensor at one head and token."""
        return self.batch * self.head_dim

    @property
    def all_heads(self) -> Indices:
        return Indices.span(0, self.heads)

    def local_shape(self, tensor: str, heads: int, rows: int) -> tuple[int, ...]:
        """Return the shape of some heads and rows of a tensor: (1, or 2 for kv; batch; heads; rows; dim)."""
        return 2 if tensor.endswith("kv") else 1, self.batch, heads, rows, self.head_dim

    def heads_of(self, tensor: str) -> int:
        """Return the number of heads of a whole tensor."""
        return self.kv_heads if tensor.endswith("kv") else self.heads

    def kv_heads_of(self, heads: Indices) -> Indices:
        """The key/value heads that some query heads read."""
        return heads.blocks(self.heads // self.kv_heads)

    def home(self, tensor: str) -> Layout:
        """Return the layout of a tensor at home; a gradient has that of its tensor."""
        return self.kv if tensor.lstrip("d") == "kv" else self.q

    def home_bytes(self, rank: int) -> int:
        """Return the bytes of inputs and output of a rank's own shard."""
        rows = 2 * self.heads * self.q.rows(rank) + 2 * self.kv_heads * self.kv.rows(rank)
        return rows * self.row_elements * self.item_bytes


@dataclass(frozen=True, kw_only=True)
class Switch(_WithDtype):
    """A tensor `x` that is redistributed from one sharded dim to another.

    Its pieces have indices of the dim before as tokens, and indices of the dim after as heads.
    """

    before: Layout
    after: Layout
    """For a gather, one index that every rank holds: `Layout.replicated(1, ranks, dim="whole")`."""
    shape: tuple[int, ...]
    """Sizes of all dims of the whole tensor."""
    dims: tuple[int, int | None]
    """Positions in `shape` of the dims before and after; None if every rank gets the whole tensor."""
    dtype: str = "float32"

    @staticmethod
    def of(before: Layout, after: Layout | None = None, *, width: int, dtype: str = "float32") -> Switch:
        """Return the switch of a tensor (before, after, width), or the gather of one (before, width)."""
        if after is None:
            whole = Layout.replicated(1, before.ranks, dim="whole")
            return Switch(before=before, after=whole, shape=(before.size, width), dims=(0, None), dtype=dtype)
        shape = (before.size, after.size, width)
        return Switch(before=before, after=after, shape=shape, dims=(0, 1), dtype=dtype)

    def __post_init__(self) -> None:
        check_dtype(self.dtype)
        if self.before.ranks != self.after.ranks:
            raise InputError(
                "`before` and `after` must have the same number of ranks, "
                f"got {self.before.ranks} and {self.after.ranks}."
            )
        source, target = self.dims
        wanted = [(source, self.before.size)] + ([] if target is None else [(target, self.after.size)])
        if source == target or any((at, size) not in enumerate(self.shape) for at, size in wanted):
            raise InputError(
                f"shape={self.shape} does not have {self.before.size} {self.before.dim} and "
                f"{self.after.size} {self.after.dim} at dims={self.dims}."
            )
        if target is None and self.after != Layout.replicated(1, self.ranks, dim="whole"):
            raise InputError(
                'The layout after a gather must be Layout.replicated(1, ranks, dim="whole"), '
                f"got {self.after}."
            )
        if any(size < 0 for size in self.shape) or prod(max(1, size) for size in self.shape) > MAX_ELEMENTS:
            raise InputError(
                f"shape must be sizes ≥ 0 of at most {MAX_ELEMENTS:,} elements, got {self.shape}."
            )

    @cached_property
    def ranks(self) -> int:
        return self.before.ranks

    @cached_property
    def row_elements(self) -> int:
        """Elements at one index of both dims: the product of all other dims."""
        return prod(size for at, size in enumerate(self.shape) if at not in self.dims)

    def local_shape(self, tensor: str, heads: int, rows: int) -> tuple[int, ...]:  # noqa: ARG002
        """Return the shape of a rectangle of the tensor, after a leading 1."""
        sizes = list(self.shape)
        source, target = self.dims
        sizes[source] = rows
        if target is not None:
            sizes[target] = heads
        return 1, *sizes

    def heads_of(self, tensor: str) -> int:  # noqa: ARG002
        return self.after.size

    def home(self, tensor: str) -> Layout:  # noqa: ARG002
        return self.before

    def home_bytes(self, rank: int) -> int:
        """Return the bytes of what a rank holds before and after."""
        held = self.before.rows(rank) * self.after.size + self.before.size * self.after.rows(rank)
        return held * self.row_elements * self.item_bytes

    def __str__(self) -> str:
        return (
            f"gather {self.before.dim}" if self.dims[1] is None else f"{self.before.dim} → {self.after.dim}"
        )
