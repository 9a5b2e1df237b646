"""GPU symmetric memory as a Window: peers' buffers over NVLink, signals on the stream.

Written against torch.distributed._symmetric_memory of torch 2.13, which is still marked as alpha. Its
sequence of calls is tested against a stand-in that keeps the same rules; NOT YET RUN ON A GPU.

The words of a message travel by host memory, ahead of the data; the data is ordered by a signal that the
sender's stream puts behind its packing and the receiver's stream waits for before it reads.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import CommError
from weft.run.comm import Comm, shm
from weft.run.comm.window import HALVES, Window, Words

CAPACITY = 1 << 30  # bytes of a half; symmetric memory is as large on all ranks and cannot grow
BARRIER = 0  # the channel of barriers; messages have the others


class Handle(Protocol):
    """The part of torch's _SymmetricMemory that is used here."""

    @property
    def buffer_ptrs(self) -> list[int]: ...
    @property
    def buffer_size(self) -> int: ...
    @property
    def signal_pad_size(self) -> int: ...
    @property
    def device(self) -> torch.device: ...
    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype, storage_offset: int) -> Tensor: ...
    def barrier(self, channel: int, timeout_ms: int) -> None: ...
    def put_signal(self, dst_rank: int, channel: int, timeout_ms: int) -> None: ...
    def wait_signal(self, src_rank: int, channel: int, timeout_ms: int) -> None: ...


class SymmetricWindow:
    """A rendezvous that all ranks have made, with a window in host memory for the words."""

    def __init__(self, handle: Handle, mail: Window, ranks: int, memory: Tensor | None = None) -> None:
        self._memory = memory  # torch would give what nobody holds to the next who asks
        self.rank, self.near, self.device_type = mail.rank, mail.near, handle.device.type
        self._handle, self._mail = handle, mail
        self._half = handle.buffer_size // HALVES
        # A pad has a 32-bit word for each pair of channel and rank.
        self._channels = handle.signal_pad_size // 4 // ranks - 1
        self._put, self._waited = dict.fromkeys(self.near, 0), dict.fromkeys(self.near, 0)
        self._in_call = dict.fromkeys(self.near, 0)

    def allocate(self, half: int, num_bytes: int) -> Tensor:
        if num_bytes > self._half:
            raise CommError(
                f"A call has {num_bytes} bytes of messages, a half of symmetric memory {self._half}.",
                hint="Use WEFT_TRANSPORT=group.",
            )
        return self.get(self.rank, half * self._half, num_bytes)

    def get(self, owner: int, offset: int, num_bytes: int) -> Tensor:
        known = owner in self.near or owner == self.rank
        if not known or not 0 <= offset <= offset + num_bytes <= HALVES * self._half:
            raise CommError(f"Bytes {offset} to {offset + num_bytes} of rank {owner} are out of bounds.")
        return self._handle.get_buffer(owner, (num_bytes,), torch.uint8, offset)

    def place(self, x: Tensor) -> tuple[int, int] | None:
        for owner, start in enumerate(self._handle.buffer_ptrs):
            if 0 <= x.data_ptr() - start < HALVES * self._half:
                return owner, x.data_ptr() - start
        return None

    def put(self, peer: int, words: Words, timeout: float) -> None:
        self._in_call[peer] += 1
        if self._in_call[peer] > self._channels:
            # A signal waits on the stream until the one before it on its channel was taken: two ranks that
            # both wait so would never end.
            raise CommError(
                f"More than {self._channels} messages to rank {peer} in one call, which is all the signal "
                "pad has room for.",
                hint="Enlarge it with torch.distributed._symmetric_memory.set_signal_pad_size.",
            )
        self._put[peer] += 1
        self._handle.put_signal(peer, self._channel(self._put[peer]), _ms(timeout))
        self._mail.put(peer, words, timeout)

    def wait(self, peer: int, timeout: float) -> Words:
        words = self._mail.wait(peer, timeout)
        self._waited[peer] += 1
        self._handle.wait_signal(peer, self._channel(self._waited[peer]), _ms(timeout))
        return words

    def arrive(self, number: int) -> None:
        del number  # the stream's own order says it
        self._in_call = dict.fromkeys(self.near, 0)

    def barrier(self, number: int, timeout: float) -> None:
        if number > 0:  # nothing was written before
            self._handle.barrier(BARRIER, _ms(timeout))

    def _channel(self, number: int) -> int:
        return 1 + number % self._channels


def meet(group: dist.ProcessGroup, base: Comm) -> tuple[Window | None, str]:
    """A window over the GPUs of all ranks, or None and why not; all ranks call it together."""
    import torch.distributed._symmetric_memory as symmetric_memory

    mail, reason = shm.meet(base)
    if not reason and not torch.cuda.is_available():
        reason = "symmetric memory needs a GPU"
    if not all(ok for (ok,) in base.gather_numbers([not reason])):
        return None, reason or "a peer has no symmetric memory"
    assert mail is not None
    device = torch.device("cuda", torch.cuda.current_device())
    memory = symmetric_memory.empty(HALVES * CAPACITY, dtype=torch.uint8, device=device)
    return SymmetricWindow(symmetric_memory.rendezvous(memory, group), mail, base.size, memory), ""


def _ms(seconds: float) -> int:
    """A time-out as torch takes it; endless ones become long ones, as with a process group."""
    return max(1, round(min(seconds, 1e6) * 1000))
