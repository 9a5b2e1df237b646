"""Block: one allocation of symmetric memory, for the messages of all groups of a process."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple, Protocol
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from weft.run import streams
from weft.run.comm import shm
from weft.run.comm.window import HALVES


class Handle(Protocol):
    """The part of torch's _SymmetricMemory that is used here."""

    @property
    def offset(self) -> int: ...
    @property
    def signal_pad_size(self) -> int: ...
    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype, storage_offset: int) -> Tensor: ...
    def get_signal_pad(self, rank: int) -> Tensor: ...
    def barrier(self, channel: int, timeout_ms: int) -> None: ...
    def put_signal(self, dst_rank: int, channel: int, timeout_ms: int) -> None: ...
    def wait_signal(self, src_rank: int, channel: int, timeout_ms: int) -> None: ...
    def stream_write_value32(self, tensor: Tensor, offset: int, val: int) -> Tensor: ...
    def memset32(self, tensor: Tensor, offset: int, val: int, count: int) -> Tensor: ...


class Leave(NamedTuple):
    """The end of a call: `event` passes when all ranks of a group have copied what the call sent."""

    mail: shm.ShmWindow
    call: int
    event: streams.Event


class Block:
    """Memory for the messages of all groups of this process on one device, in halves.

    torch maps one allocation for several groups, each by a rendezvous of its own.
    """

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.half_bytes = memory, memory.numel() // HALVES
        self.handles: dict[str, Handle] = {}
        """By group. Those of one group have it on all of its ranks, or on none."""
        self.last: list[Leave | None] = [None] * HALVES
        """The last call that wrote each half."""
        self.half = 0
        """The one that was written last, or is being written."""

    def turn(self, halves: int) -> int:
        """The next half. Ranks of a group may be at different ones: words tell where a message lies."""
        self.half = (self.half + 1) % halves
        return self.half


_newest: WeakValueDictionary[torch.device, Block] = WeakValueDictionary()
"""Blocks live as long as a window uses them."""


class Source(Protocol):
    """Where symmetric memory comes from: torch, for one process group."""

    device: torch.device
    group: str
    blocks: MutableMapping[torch.device, Block]
    """The newest of each device, whichever group it was made for."""

    def empty(self, num_bytes: int) -> Tensor:
        """New memory, which is given back with the last reference to it."""
        ...

    def rendezvous(self, memory: Tensor) -> Handle:
        """Map the memory of all ranks of the group; they call it together."""
        ...


class TorchSource:
    """Memory outside of torch's pool, which would never give it back to the device."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self.group: str = group.group_name
        self.blocks: MutableMapping[torch.device, Block] = _newest

    @torch.inference_mode(mode=False)  # it outlives the mode of the call that makes it
    def empty(self, num_bytes: int) -> Tensor:
        from torch._C._distributed_c10d import _SymmetricMemory

        return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self.device)

    def rendezvous(self, memory: Tensor) -> Handle:
        from torch._C._distributed_c10d import _SymmetricMemory

        return _SymmetricMemory.rendezvous(memory, self.group)  # pyright: ignore[reportReturnType] - `offset`


def symmetric_backend(device: torch.device) -> str | None:
    """What torch makes symmetric memory of a device by: CUDA, NVSHMEM or NCCL."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.get_backend(device)
