"""What a schedule is for: a `Problem` is an attention, a `Switch` moves a tensor from dim to dim."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from weft.core.codec import value
from weft.core.errors import InputError
from weft.core.indices import EMPTY, Indices
from weft.core.layout import Layout

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

MAX_ELEMENTS = 1 << 48
"""Bytes of many transfers are added up in 64 bits."""


def check_dtype(name: str) -> None:
    if name not in ITEM_BYTES:
        raise InputError(f"dtype {name!r} is not supported.", hint=f"Use one of {', '.join(ITEM_BYTES)}.")


@value
@dataclass(frozen=True, kw_only=True)
class Problem:
    """Sizes, dtype, and the home layout of the query and of the key/value tokens."""

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
                raise InputError(f"{name}={getattr(self, name)}.", hint="It must be 1 or more.")
        if self.heads % self.kv_heads:
            near = [n for n in range(1, min(self.heads, 1024) + 1) if self.heads % n == 0]
            raise InputError(
                f"{self.heads} query heads cannot share {self.kv_heads} key/value heads evenly.",
                hint=f"kv_heads may be one of {near}.",
            )
        if self.q.ranks != self.kv.ranks:
            raise InputError(
                f"The query tokens are laid out over {self.q.ranks} ranks, the key/value tokens over "
                f"{self.kv.ranks}.",
                hint="Give both layouts the same number of ranks.",
            )
        check_dtype(self.dtype)
        elements = self.batch * self.heads * self.head_dim * max(self.q.size, self.kv.size)
        if elements > MAX_ELEMENTS:
            raise InputError(
                f"batch={self.batch:,}, heads={self.heads:,} and head_dim={self.head_dim:,} are too large.",
                hint=f"A tensor has at most {MAX_ELEMENTS:,} elements.",
            )

    @property
    def ranks(self) -> int:
        return self.q.ranks

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def sum_bytes(self) -> int:
        """Bytes of one element of what is summed over ranks: float32 or better."""
        return max(4, self.item_bytes)

    @property
    def row_elements(self) -> int:
        """Elements of a tensor at one head and token."""
        return self.batch * self.head_dim

    @property
    def all_heads(self) -> Indices:
        return Indices.span(0, self.heads)

    def heads_of(self, tensor: str) -> int:
        """Return the number of heads of a whole tensor."""
        return self.kv_heads if tensor.endswith("kv") else self.heads

    def kv_heads_of(self, heads: Indices) -> Indices:
        """The key/value heads that some query heads read."""
        return heads.blocks(self.heads // self.kv_heads) if heads else EMPTY

    def home(self, tensor: str) -> Layout:
        """The layout a tensor has at home; gradients live where their tensors do."""
        return self.kv if tensor.lstrip("d") == "kv" else self.q

    def home_bytes(self, rank: int) -> int:
        """Inputs and output of a rank's own shard."""
        rows = 2 * self.heads * self.q.rows(rank) + 2 * self.kv_heads * self.kv.rows(rank)
        return rows * self.row_elements * self.item_bytes


@value
@dataclass(frozen=True, kw_only=True)
class Switch:
    """A tensor `x` that is sharded by one dim and is to be sharded by another.

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
                f"`before` is a layout over {self.before.ranks} ranks, `after` over {self.after.ranks}.",
                hint="Give both layouts the same number of ranks.",
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
                f"The layout after a gather is {self.after}.",
                hint='It must be Layout.replicated(1, ranks, dim="whole").',
            )
        if any(size < 0 for size in self.shape) or prod(max(1, size) for size in self.shape) > MAX_ELEMENTS:
            raise InputError(
                f"shape={self.shape} is negative or too large.",
                hint=f"A tensor has at most {MAX_ELEMENTS:,} elements.",
            )

    @property
    def ranks(self) -> int:
        return self.before.ranks

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def sum_bytes(self) -> int:
        return max(4, self.item_bytes)

    @property
    def row_elements(self) -> int:
        """Elements at one index of both dims: the product of all other dims."""
        return prod(size for at, size in enumerate(self.shape) if at not in self.dims)

    @property
    def all_heads(self) -> Indices:
        return Indices.span(0, self.after.size)

    def heads_of(self, tensor: str) -> int:  # noqa: ARG002
        return self.after.size

    def home(self, tensor: str) -> Layout:  # noqa: ARG002
        return self.before

    def home_bytes(self, rank: int) -> int:
        """What the rank holds before and after."""
        held = self.before.rows(rank) * self.after.size + self.before.size * self.after.rows(rank)
        return held * self.row_elements * self.item_bytes

    def __str__(self) -> str:
        return (
            f"gather {self.before.dim}" if self.dims[1] is None else f"{self.before.dim} → {self.after.dim}"
        )
