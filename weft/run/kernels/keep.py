"""Blocks that are always selected, whatever their scores are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import InputError

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Keep:
    """Tiles that are always selected, in block indices; they count towards the budget."""

    kv: Ranges = ()
    """Ranges of kv blocks that every row reads."""
    q: Ranges = ()
    """Ranges of q blocks that read everything."""
    own: tuple[int, int] | None = None
    """(tokens of a q block, of a kv block): every row reads the kv blocks that hold its own tokens."""

    def __post_init__(self) -> None:
        for start, stop in (*self.kv, *self.q):
            if not 0 <= start <= stop:
                raise InputError(f"Ranges of blocks must have 0 <= start <= stop, got ({start}, {stop}).")
        if self.own is not None and min(self.own) < 1:
            raise InputError(f"own must be (block_q, block_k) >= 1, got {self.own}.")

    @staticmethod
    def of_tokens(
        text: Iterable[tuple[int, int]], *, block_q: int, block_k: int | None = None, own: bool = True
    ) -> Keep:
        """Keep every block with a text token: all rows read it, and it reads everything."""
        block_k = block_k or block_q
        ranges = tuple((start, stop) for start, stop in text if stop > start)
        kv = tuple((start // block_k, -(-stop // block_k)) for start, stop in ranges)
        q = tuple((start // block_q, -(-stop // block_q)) for start, stop in ranges)
        return Keep(kv, q, (block_q, block_k) if own else None)

    def tiles(self, span: slice, rows: int, cols: int, device: torch.device | None = None) -> Tensor | None:
        """Return booleans [q blocks of `span`, kv blocks] for all heads; None if nothing is kept."""
        for ranges, size, name in ((self.kv, cols, "kv"), (self.q, rows, "q")):
            if any(stop > size for _, stop in ranges):
                raise InputError(f"keep has {name} blocks {ranges}, but there are only {size}.")
        if not (self.kv or self.q or self.own):
            return None
        kept = torch.zeros(span.stop - span.start, cols, dtype=torch.bool, device=device)
        for start, stop in self.kv:
            kept[:, start:stop].fill_(True)  # noqa: FBT003
        for start, stop in self.q:
            kept[max(0, start - span.start) : max(0, stop - span.start)].fill_(True)  # noqa: FBT003
        if self.own is not None:
            block_q, block_k = self.own
            row = torch.arange(span.start, span.stop, device=device)[:, None]
            col = torch.arange(cols, device=device)[None]
            kept |= (row * block_q < (col + 1) * block_k) & (col * block_k < (row + 1) * block_q)
        return kept
