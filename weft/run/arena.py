"""Arena: the memory of program workspaces, shared by all programs that run one after another.

The layers of a model may each have a plan, and only one of them runs at a time on a stream. Programs on
different streams of a device may run at the same time, so each stream has a block of its own.

A CUDA graph uses the addresses of its capture whenever it is replayed. So the block of a captured program
leaves the arena and is never freed; later runs get another one.
"""

from __future__ import annotations

from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from weft.run.comm import Borrower

SHRINK_RATIO = 4
"""A block that is larger than needed by more than this factor is freed."""


class Tenant(Borrower, Protocol):
    """A program that is bound to a block."""

    num_bytes: int


_of_graphs: list[Tenant] = []
"""Captured programs, kept alive with the memory and tables that they use."""


class Arena:
    """One flat block for each device and stream, as large as the largest program that is bound to it."""

    def __init__(self) -> None:
        self.history = 0
        """A hash of all noted calls, in order."""
        self._blocks: dict[tuple[torch.device, int], Tensor] = {}
        self._tenants: dict[tuple[torch.device, int], WeakSet[Tenant]] = {}
        self.retired: WeakKeyDictionary[Tenant, Tensor] = WeakKeyDictionary()
        """Tenants of blocks that belong to graphs. Only a capture may still run them."""

    def note(self, tag: int) -> None:
        self.history = (self.history * 1_000_003 + tag) % (1 << 61)

    def block(self, device: torch.device, stream: int, tenant: Tenant) -> Tensor:
        """Return the block of a stream, large enough for a tenant, which views it until it is unbound."""
        key = device, stream
        tenants = self._tenants.setdefault(key, WeakSet())
        tenants.add(tenant)
        block = self._blocks.get(key)
        needed = max(each.num_bytes for each in tenants)
        if block is None or not needed <= block.numel() <= SHRINK_RATIO * max(needed, 1):
            # Free the old block before allocating: no program may still view it.
            for each in tenants:
                each.unbind()
            self._blocks.pop(key, None)
            del block
            block = self._blocks[key] = _empty(needed, device)
        return block

    def capture(self, tenant: Tenant) -> None:
        """Give a tenant and its block to CUDA graphs."""
        key = next((key for key, tenants in self._tenants.items() if tenant in tenants), None)
        if key is not None:
            block = self._blocks.pop(key)
            # The others stay bound: the same graph may capture them next, and could not bind them.
            self.retired.update(dict.fromkeys(self._tenants.pop(key), block))
        _of_graphs.append(tenant)

    def clear(self) -> None:
        """Free all memory; the next run allocates its own."""
        for tenants in self._tenants.values():
            for tenant in tenants:
                tenant.unbind()
        self._blocks.clear()

    def num_bytes(self) -> int:
        return sum(block.numel() for block in self._blocks.values())


@torch.inference_mode(mode=False)  # a block outlives the mode of the call that makes it
def _empty(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=device)
