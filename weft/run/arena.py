"""Arena: the memory in which programs have their buffers, shared by all that run one after another.

The layers of one model may each have a plan of their own, and only one of them runs at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor

ALIGN = 64


class Arena:
    """One flat block on each device, as large as the largest program needs."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, Tensor] = {}

    def has(self, block: Tensor) -> bool:
        """Whether a block that was lent is still the one."""
        return self._blocks.get(block.device) is block

    def lend(self, sizes: dict[str, int], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
        """The block, and a buffer of each size in it; they are good until the block is another one."""
        return cut(sizes, lambda total: self._block(total, device))

    def _block(self, total: int, device: torch.device) -> Tensor:
        block = self._blocks.get(device)
        if block is None or block.numel() < total:
            self._blocks.pop(device, None)  # give the old one back before asking for more
            del block
            block = self._blocks[device] = torch.empty(total, dtype=torch.uint8, device=device)
        return block


def cut(sizes: dict[str, int], block_of: Callable[[int], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """A block that is large enough, and a buffer of each size in it, aligned and apart."""
    ends = list(accumulate(-(-size // ALIGN) * ALIGN for size in sizes.values()))
    block = block_of(ends[-1] if ends else 0)
    starts = [0, *ends[:-1]]
    return block, {
        name: block[start : start + size] for (name, size), start in zip(sizes.items(), starts, strict=False)
    }
