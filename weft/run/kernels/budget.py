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

    def most(self, rows: int, cols: int) -> int:
        """At most so many tiles of one head are kept."""
        each = sum(stop - start for start, stop in self.kv)
        if self.own is not None:
            each += self.own[0] // self.own[1] + 2
        return rows * min(each, cols) + sum(stop - start for start, stop in self.q) * cols

    def tiles(self, part: slice, rows: int, cols: int, device: torch.device | None = None) -> Tensor | None:
        """[q blocks of `part`, kv blocks], the same for all heads; None where nothing is kept."""
        for ranges, size, name in ((self.kv, cols, "kv"), (self.q, rows, "q")):
            if any(stop > size for _, stop in ranges):
                raise InputError(f"keep has {name} blocks {ranges}, but there are only {size}.")
        if not (self.kv or self.q or self.own):
            return None
        kept = torch.zeros(part.stop - part.start, cols, dtype=torch.bool, device=device)
        for start, stop in self.kv:
            kept[:, start:stop].fill_(True)  # noqa: FBT003
        for start, stop in self.q:
            kept[max(0, start - part.start) : max(0, stop - part.start)].fill_(True)  # noqa: FBT003
        if self.own is not None:
            block_q, block_k = self.own
            row = torch.arange(part.start, part.stop, device=device)[:, None]
            col = torch.arange(cols, device=device)[None]
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
        elif given.dtype == torch.bool or not _holds(given >= 0):
            raise InputError(f"k={k} is no budget.", hint="Give blocks (int, 0 or more) or shares (float).")
        return Budget(_spread(given.long(), heads, rows))

    @staticmethod
    def shares(p: float | Tensor, heads: int, rows: int, _cols: int) -> Budget:
        return Budget(_spread(_shares(torch.as_tensor(p), "p"), heads, rows))

    def of(self, heads: slice, rows: slice) -> Tensor:
        return self.values[heads, rows].reshape(-1)

    def to(self, device: torch.device) -> Budget:
        """On a device: one number for all rows is written there, more are copied."""
        values = self.values
        if values.device.type == "cpu" != device.type and not any(values.stride()):
            return Budget(torch.full(values.shape, values[0, 0].item(), dtype=values.dtype, device=device))
        return Budget(values.to(device))

    def total(self, cols: int) -> int | None:
        """At most so many tiles are allowed in all; None for shares of masses, and where only a GPU knows."""
        if self.values.device.type != "cpu" or self.values.is_floating_point():
            return None
        return int(self.values.clamp(max=cols).sum())


def _holds(claim: Tensor) -> bool:
    """Whether it holds everywhere; nothing is asked of a GPU, which would have to be waited for."""
    return claim.device.type != "cpu" or bool(claim.all())


def _shares(given: Tensor, name: str) -> Tensor:
    if not _holds((given >= 0) & (given <= 1)):
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
