"""Problem: the attention that has to be computed, and where its tensors live."""

from __future__ import annotations

from dataclasses import dataclass

from weft.core.codec import value
from weft.core.errors import InputError
from weft.core.indices import EMPTY, Indices
from weft.core.layout import Layout

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


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
            near = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
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
        if self.dtype not in ITEM_BYTES:
            raise InputError(
                f"dtype {self.dtype!r} is not supported.", hint=f"Use one of {list(ITEM_BYTES)}."
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
