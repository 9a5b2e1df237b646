"""One allocation of symmetric memory for the messages of all groups of a process."""

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


class SymmetricHandle(Protocol):
    """The methods of torch's _SymmetricMemory that are used here."""

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


class CallEnd(NamedTuple):
    """The end of a call: `event` passes when all ranks of the group have copied its messages."""

    host_window: shm.ShmWindow
    call: int
    event: streams.Event


class SymmetricBlock:
    """Memory on one device, in halves, that each group maps by its own rendezvous."""

    def __init__(self, memory: Tensor) -> None:
        self.memory, self.half_bytes = memory, memory.numel() // HALVES
        self.handles: dict[str, SymmetricHandle] = {}
        """By group; all ranks of a group have one here, or none has."""
        self.last: list[CallEnd | None] = [None] * HALVES
        """By half: the last call that wrote it."""
        self.half = 0
        """The half written last, or now."""

    def turn(self) -> int:
        """Return the next half; ranks of a group may be at different ones, since descriptors have offsets."""
        self.half = (self.half + 1) % HALVES
        return self.half


_newest: WeakValueDictionary[torch.device, SymmetricBlock] = WeakValueDictionary()
"""The newest block of each device; windows keep blocks alive."""


class SymmetricAllocator:
    """Allocator for one process group, outside of torch's pool, which would never return memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.device = device
        self.group: str = group.group_name
        self.blocks: MutableMapping[torch.device, SymmetricBlock] = _newest
        """The newest block of each device, of any group."""

    @torch.inference_mode(mode=False)  # the memory outlives the mode of this call
    def empty(self, num_bytes: int) -> Tensor:
        """Return new memory, which is freed with the last reference to it."""
        from torch._C._distributed_c10d import _SymmetricMemory

        return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self.device)

    def rendezvous(self, memory: Tensor) -> SymmetricHandle:
        """Map the memory of all ranks of the group, which call it together."""
        from torch._C._distributed_c10d import _SymmetricMemory

        return _SymmetricMemory.rendezvous(memory, self.group)  # pyright: ignore[reportReturnType] - `offset`


def symmetric_backend(device: torch.device) -> str | None:
    """Return the backend of torch's symmetric memory on a device: CUDA, NVSHMEM or NCCL."""
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.get_backend(device)
