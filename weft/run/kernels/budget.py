"""Budgets of a block selection, per head or row, and blocks that are always selected."""

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

    def most(self, rows: int, cols: int) -> int:
        """Return an upper bound of the kept tiles of one head."""
        each = sum(stop - start for start, stop in self.kv)
        if self.own is not None:
            each += self.own[0] // self.own[1] + 2
        return rows * min(each, cols) + sum(stop - start for start, stop in self.q) * cols

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


@dataclass(frozen=True, eq=False)
class Budget:
    """[heads, q blocks]: blocks of each row as int64, or shares of its mass as float64."""

    values: Tensor

    @staticmethod
    def blocks(k: int | float | Tensor, heads: int, rows: int, cols: int) -> Budget:
        """Convert k: integers count blocks, floats are shares of the kv blocks."""
        counts = torch.as_tensor(k)
        if counts.is_floating_point():
            share = _shares(counts, "k")
            counts = (share * cols + 0.5).floor().clamp(min=(share > 0).double())
        elif counts.dtype == torch.bool or not _holds(counts >= 0):
            raise InputError(f"k must be >= 0 blocks (int) or a share of them (float), got {k}.")
        return Budget(_spread(counts.long(), heads, rows))

    @staticmethod
    def shares(p: float | Tensor, heads: int, rows: int, _cols: int) -> Budget:
        return Budget(_spread(_shares(torch.as_tensor(p), "p"), heads, rows))

    def of(self, heads: slice, rows: slice) -> Tensor:
        return self.values[heads, rows].reshape(-1)

    def to(self, device: torch.device) -> Budget:
        """Move to a device: a single number for all rows is filled in there, more are copied."""
        values = self.values
        if values.device.type == "cpu" != device.type and not any(values.stride()):
            return Budget(torch.full(values.shape, values[0, 0].item(), dtype=values.dtype, device=device))
        return Budget(values.to(device))

    def total(self, cols: int) -> int | None:
        """Return an upper bound of all tiles; None for shares of mass, and for values on a GPU."""
        if self.values.device.type != "cpu" or self.values.is_floating_point():
            return None
        return int(self.values.clamp(max=cols).sum())


def _holds(claim: Tensor) -> bool:
    """Whether a condition holds everywhere; not checked on a GPU, which would have to be waited for."""
    return claim.device.type != "cpu" or bool(claim.all())


def _shares(values: Tensor, name: str) -> Tensor:
    if not _holds((values >= 0) & (values <= 1)):
        raise InputError(f"{name} must be between 0 and 1.")
    return values.double()


def _spread(values: Tensor, heads: int, rows: int) -> Tensor:
    if tuple(values.shape) not in ((), (heads,), (heads, rows)):
        raise InputError(
            f"A budget of shape {tuple(values.shape)} does not fit {heads} heads and {rows} q blocks.",
            hint=f"Give one number, [{heads}] per head or [{heads}, {rows}] per row.",
        )
    return (values[:, None] if values.ndim == 1 else values).expand(heads, rows)
