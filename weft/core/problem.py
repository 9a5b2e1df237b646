"""Problem: the attention that has to be computed, and where its tensors live."""

from __future__ import annotations

from dataclasses import dataclass

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
    def all_heads(self) -> Indices:
        return Indices.span(0, self.heads)

    def kv_heads_of(self, heads: Indices) -> Indices:
        """The key/value heads that some query heads read."""
        return heads.blocks(self.heads // self.kv_heads) if heads else EMPTY

    def home(self, tensor: str) -> Layout:
        """The layout a tensor has at home; gradients live where their tensors do."""
        return self.kv if tensor.lstrip("d") == "kv" else self.q

    def home_bytes(self, rank: int) -> int:
        """Inputs and output of a rank's own shard."""
        rows = 2 * self.heads * self.q.rows(rank) + 2 * self.kv_heads * self.kv.rows(rank)
        return rows * self.batch * self.head_dim * self.item_bytes


@value
@dataclass(frozen=True, kw_only=True)
class Switch(Problem):
    """Nothing to attend: a tensor `x`, sharded by one dim, is to be sharded by another.

    The dim that is sharded before stands where tokens do (`q`), the one after where heads do, and all
    other dims together are `head_dim`. If every rank holds all of `after`, it is a gather.
    """

    after: Layout

    def __post_init__(self) -> None:
        Problem.__post_init__(self)
        if (self.after.ranks, self.after.size) != (self.ranks, self.heads):
            raise InputError(
                f"{self.after} does not lay out {self.heads} {self.after.dim} over {self.ranks} ranks."
            )

    @staticmethod
    def of(before: Layout, after: Layout, *, width: int, dtype: str = "float32") -> Switch:
        """`width` is the number of elements at each index of the two dims."""
        return Switch(
            batch=1,
            heads=after.size,
            kv_heads=after.size,
            head_dim=width,
            q=before,
            kv=before,
            dtype=dtype,
            after=after,
        )

    def home_bytes(self, rank: int) -> int:
        """What the rank holds before and after."""
        held = self.q.rows(rank) * self.after.size + self.q.size * self.after.rows(rank)
        return held * self.head_dim * self.item_bytes
