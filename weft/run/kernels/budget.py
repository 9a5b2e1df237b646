"""What a selection is allowed and what it always has: budgets per head or row, and kept blocks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import InputError

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Keep:
    """Tiles that a selection always has, in block indices; they count inside its budget."""

    kv: Ranges = ()
    """Ranges of kv blocks that every row reads."""
    q: Ranges = ()
    """Ranges of q blocks that read everything."""
    own: tuple[int, int] | None = None
    """(tokens of a q block, of a kv block): every row reads the kv blocks that hold its own tokens."""

    def __post_init__(self) -> None:
        for start, stop in (*self.kv, *self.q):
            if not 0 <= start <= stop:
                raise InputError(f"({start}, {stop}) is no range of blocks.", hint="Give 0 <= start <= stop.")
        if self.own is not None and min(self.own) < 1:
            raise InputError(f"own={self.own} are no sizes of blocks.", hint="Give (block_q, block_k).")

    @staticmethod
    def of_tokens(
        text: Iterable[tuple[int, int]], *, block_q: int, block_k: int | None = None, own: bool = True
    ) -> Keep:
        """Every block that has a text token: read by all rows, and reading everything itself."""
        block_k = block_k or block_q
        ranges = tuple((start, stop) for start, stop in text if stop > start)
        kv = tuple((start // block_k, -(-stop // block_k)) for start, stop in ranges)
        q = tuple((start // block_q, -(-stop // block_q)) for start, stop in ranges)
        return Keep(kv, q, (block_q, block_k) if own else None)

    def tiles(self, part: slice, rows: int, cols: int) -> Tensor | None:
        """[q blocks of `part`, kv blocks], the same for all heads; None where nothing is kept."""
        for ranges, size, name in ((self.kv, cols, "kv"), (self.q, rows, "q")):
            if any(stop > size for _, stop in ranges):
                raise InputError(f"keep has {name} blocks {ranges}, but there are only {size}.")
        if not (self.kv or self.q or self.own):
            return None
        kept = torch.zeros(part.stop - part.start, cols, dtype=torch.bool)
        for start, stop in self.kv:
            kept[:, start:stop] = True
        for start, stop in self.q:
            kept[max(0, start - part.start) : max(0, stop - part.start)] = True
        if self.own is not None:
            block_q, block_k = self.own
            row, col = torch.arange(part.start, part.stop)[:, None], torch.arange(cols)[None]
            kept |= (row * block_q < (col + 1) * block_k) & (col * block_k < (row + 1) * block_q)
        return kept


@dataclass(frozen=True, eq=False)
class Budget:
    """[heads, q blocks]: blocks of each row as int64, or the share of its mass as float64."""

    values: Tensor

    @staticmethod
    def blocks(k: int | float | Tensor, heads: int, rows: int, cols: int) -> Budget:
        """Whole numbers are blocks, floats are shares of the kv blocks."""
        given = torch.as_tensor(k)
        if given.is_floating_point():
            share = _shares(given, "k")
            given = (share * cols + 0.5).floor().clamp(min=(share > 0).double())
        elif given.dtype == torch.bool or bool((given < 0).any()):
            raise InputError(f"k={k} is no budget.", hint="Give blocks (int, 0 or more) or shares (float).")
        return Budget(_spread(given.long(), heads, rows))

    @staticmethod
    def shares(p: float | Tensor, heads: int, rows: int, _cols: int) -> Budget:
        return Budget(_spread(_shares(torch.as_tensor(p), "p"), heads, rows))

    def of(self, heads: slice, rows: slice) -> Tensor:
        return self.values[heads, rows].reshape(-1)


def _shares(given: Tensor, name: str) -> Tensor:
    if not bool(((given >= 0) & (given <= 1)).all()):
        raise InputError(f"{name} has values that are no shares.", hint="Give floats from 0 to 1.")
    return given.double()


def _spread(values: Tensor, heads: int, rows: int) -> Tensor:
    fits = {0: (), 1: (heads,), 2: (heads, rows)}
    if fits.get(values.ndim) != tuple(values.shape):
        raise InputError(
            f"A budget of shape {tuple(values.shape)} does not fit {heads} heads and {rows} q blocks.",
            hint=f"Give one number, [{heads}] per head or [{heads}, {rows}] per row.",
        )
    return (values[:, None] if values.ndim == 1 else values).expand(heads, rows)
