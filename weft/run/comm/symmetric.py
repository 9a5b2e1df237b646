"""Symmetric memory of GPUs as a Window: each message is copied once over NVLink, by copy engines.

Written against torch.distributed._symmetric_memory of torch 2.13, which is still marked as alpha. Its
sequence of calls is tested against a stand-in that keeps the same rules; NOT YET RUN ON A GPU.

Descriptors travel through host memory. The sender first queues a signal behind the packing of the message, on
its stream, and then sends the descriptor; the receiver first receives the descriptor, and then queues a wait
for the signal and a copy, on a side stream. So whatever a stream waits for has been queued before, on every
device, and a late peer is a timeout of the host, which names it. The device waits only for a peer that has
queued its signal and never runs it. Such waits have no timeout, since torch's would trap and end the process:
the watcher names the rank, and `release` ends the waits.
"""

from __future__ import annotations

import time
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import CommError
from weft.run import streams
from weft.run.comm import Comm, reason_of, shm
from weft.run.comm.symmetric_block import (
    CallEnd,
    SymmetricAllocator,
    SymmetricBlock,
    SymmetricHandle,
    symmetric_backend,
)
from weft.run.comm.window import HALVES, Descriptor, LatePeerError, Window

GRANULE = 1 << 21
"""Bytes that sizes are rounded up to, as CUDA does."""
BARRIER = 0
"""The channel of barriers; messages use the others."""
ENDLESS = 0
"""torch's value for no timeout."""
ROUNDS, ROUND_SECONDS = 40, 0.05
CLOSE_SECONDS = 5.0
"""Time for the hosts of the peers to end the last calls."""


class SymmetricWindow(Window):
    """Memory of this rank and its peers for messages, and a signal pad of this group and timeout only.

    A pad belongs to an allocation, and its words are indexed by rank and channel of a group, so two groups
    would share words: hence a small allocation for signals beside the block for messages.
    """

    lands = True

    def __init__(
        self,
        source: SymmetricAllocator,
        base: Comm,
        host_window: shm.ShmWindow,
        signals: tuple[Tensor, SymmetricHandle],
    ) -> None:
        self.rank, self.near, self.device_type = host_window.rank, host_window.near, source.device.type
        self._source, self._base, self._host, self._device = source, base, host_window, source.device
        self._pad_memory, self._signals = signals
        self._channels = self._signals.signal_pad_size // 4 // base.size - 1
        self._block: SymmetricBlock | None = None
        self._half = 0
        self._put, self._waited = dict.fromkeys(self.near, 0), dict.fromkeys(self.near, 0)
        self._in_call = dict.fromkeys(self.near, 0)
        self._under_way: dict[str, streams.Event] = {}
        """The last event of each side stream."""

    def reserve(self, num_bytes: int, timeout: float) -> bool:
        newest = self._source.blocks.get(self._device)
        size, is_mapped = (newest.half_bytes, self._source.group in newest.handles) if newest else (0, False)
        rows = self._base.all_gather_ints([num_bytes, size, int(is_mapped)])
        needed = max(row[0] for row in rows)
        if newest is None or size < needed or any(row[1:] != rows[0][1:] for row in rows):
            # Ranks whose memory differs need another block; the group can only map new memory of all ranks.
            newest = self._grow(max(max(row[:2]) for row in rows))
        if self._source.group not in newest.handles:
            newest.handles[self._source.group] = self._source.rendezvous(newest.memory)
        if newest is self._block:
            return False
        self._block, newest.half = newest, self._half
        self._await_readers(timeout)  # another group may have written this half last
        return True

    def _grow(self, half_bytes: int) -> SymmetricBlock:
        size, memory, reason = HALVES * (-(-max(half_bytes, 1) // GRANULE) * GRANULE), None, ""
        try:
            memory = self._source.empty(size)
        except RuntimeError as error:
            reason = f" ({reason_of(error)})"
        if late := _without(self._base, ok=memory is not None):
            raise CommError(
                f"Symmetric memory of {size:,} bytes for messages does not fit on rank {late[0]}{reason}.",
                hint="Set WEFT_TRANSPORT=group, or leave more memory of the GPU free.",
            )
        assert memory is not None
        block = self._source.blocks[self._device] = SymmetricBlock(memory)
        return block

    def allocate(self, half: int, num_bytes: int) -> Tensor:
        block = self._block
        if block is None or num_bytes > block.half_bytes:
            had = 0 if block is None else block.half_bytes
            raise CommError(
                f"A call has {num_bytes} bytes of messages, a half of symmetric memory {had}.",
                hint="All ranks must call `reserve` before.",
            )
        return block.memory.narrow(0, half * block.half_bytes, num_bytes)

    def get(self, owner: int, offset: int, num_bytes: int) -> Tensor:
        block, known = self._block, owner in self.near or owner == self.rank
        size = 0 if block is None else block.memory.numel()
        if block is None or not known or not 0 <= offset <= offset + num_bytes <= size:
            raise CommError(f"Bytes {offset} to {offset + num_bytes} of rank {owner} are out of bounds.")
        handle = block.handles[self._source.group]
        # torch counts from the start of the allocation, in which the tensor may lie further on.
        return handle.get_buffer(owner, (num_bytes,), torch.uint8, handle.offset + offset)

    def place(self, x: Tensor) -> tuple[int, int] | None:
        if self._block is None:
            return None
        offset = x.data_ptr() - self._block.memory.data_ptr()
        return (self.rank, offset) if 0 <= offset < self._block.memory.numel() else None

    def put(self, peer: int, descriptor: Descriptor, timeout: float) -> None:
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
        self._signals.put_signal(peer, self._channel(self._put[peer]), ENDLESS)
        self._host.put(peer, descriptor, timeout)

    def wait(self, peer: int, timeout: float) -> Descriptor:
        descriptor = self._host.wait(peer, timeout)
        self._waited[peer] += 1
        # In the order of the peer's stream, so it delays no other message of this peer.
        with streams.on(streams.side(self._device, "land")):
            self._signals.wait_signal(peer, self._channel(self._waited[peer]), ENDLESS)
        return descriptor

    def land(self, message: Tensor, into: Tensor, ready: streams.Event) -> streams.Event:
        with streams.on(streams.side(self._device, "land")):
            streams.wait(self._device, ready)
            streams.copy(into, message)
            landed = self._under_way["land"] = streams.record(self._device)
        return landed

    def turn(self, call: int, timeout: float) -> int:
        self._half = call % HALVES if self._block is None else self._block.turn()
        if self._block is not None:
            self._await_readers(timeout)
        return self._half

    def _await_readers(self, timeout: float) -> None:
        """Order the stream behind the copies of the old contents of a half; the host waits for hosts only."""
        assert self._block is not None
        if (last := self._block.last[self._half]) is not None:
            last.host_window.barrier(last.call, timeout)
            streams.wait(self._device, last.event)

    def arrive(self, call: int) -> None:
        self._in_call = dict.fromkeys(self.near, 0)
        if self._block is not None:
            ended = streams.record(self._device)  # this stream has waited for every copy of the call
            with streams.on(streams.side(self._device, "leave")):
                streams.wait(self._device, ended)
                self._signals.barrier(BARRIER, ENDLESS)
                left = self._under_way["leave"] = streams.record(self._device)
            self._block.last[self._half] = CallEnd(self._host, call, left)
        self._host.arrive(call)

    def release(self) -> None:
        """End the kernels that wait for signals: set all signals of this rank, and clear those it puts.

        The data that they then read is wrong, so the group must have failed before.
        """
        own, others = self._signals.get_signal_pad(self.rank), sorted(self.near)
        at = BARRIER * self._base.size + self.rank
        for _ in range(ROUNDS):  # each wait clears its signal for the next
            with streams.on(streams.side(self._device, "release")):
                self._signals.memset32(own, 0, 1, own.numel())
                for peer in others:
                    self._signals.stream_write_value32(self._signals.get_signal_pad(peer), at, 0)
            time.sleep(ROUND_SECONDS)
            if all(event.query() for event in self._under_way.values()):
                return

    def close(self) -> None:
        """Free the memory once the peers have copied their messages; a lost peer is not waited for."""
        with suppress(LatePeerError, RuntimeError):  # RuntimeError: of a device that has failed
            for last in self._block.last if self._block else ():
                if last is not None:
                    last.host_window.barrier(last.call, CLOSE_SECONDS)
                    last.event.synchronize()
        self._block = None
        del self._pad_memory, self._signals

    def _channel(self, number: int) -> int:
        return 1 + number % self._channels


def rendezvous(group: dist.ProcessGroup, base: Comm) -> tuple[Window | None, str]:
    """Return a window over the GPUs of all ranks, or None and why not; all ranks call it together."""
    host_window, reason = shm.rendezvous(base)
    reason = reason or _missing()
    if late := _without(base, ok=not reason):
        return None, reason or f"rank {late[0]} has no symmetric memory"
    assert host_window is not None
    source = SymmetricAllocator(group, torch.device("cuda", torch.cuda.current_device()))
    return window_of(source, base, host_window)


def window_of(
    source: SymmetricAllocator, base: Comm, host_window: shm.ShmWindow
) -> tuple[SymmetricWindow | None, str]:
    """Map symmetric memory of all ranks; return None and why not, on all ranks, if any of them fails."""
    memory, handle, reason = None, None, ""
    try:
        memory = source.empty(GRANULE)
    except RuntimeError as error:  # no driver API, no handle that another process can open
        reason = reason_of(error)
    if not (late := _without(base, ok=memory is not None)):
        assert memory is not None
        try:
            handle = source.rendezvous(memory)
        except RuntimeError as error:  # no peer access, or two ranks on one GPU
            reason = reason_of(error)
        late = _without(base, ok=handle is not None)
    if late or memory is None or handle is None:
        return None, reason or f"rank {late[0]} has no symmetric memory"
    return SymmetricWindow(source, base, host_window, (memory, handle)), ""


def _missing() -> str:
    """Return why this process has no symmetric memory; "" if it may have some."""
    if not torch.cuda.is_available():
        return "symmetric memory needs a GPU"
    backend = symmetric_backend(torch.device("cuda", torch.cuda.current_device()))
    return "" if backend in (None, "CUDA") else f"torch has it by {backend}, not by CUDA (TORCH_SYMMMEM=CUDA)"


def _without(base: Comm, *, ok: bool) -> list[int]:
    """Return the ranks that pass ok=False; all ranks call it together."""
    return [rank for rank, (is_ok,) in enumerate(base.all_gather_ints([int(ok)])) if not is_ok]
