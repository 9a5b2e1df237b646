"""Symmetric memory of GPUs as a Window: messages are copied once over NVLink, by copy engines.

Written against torch.distributed._symmetric_memory of torch 2.13, which is still marked as alpha. Its
sequence of calls is tested against a stand-in that keeps the same rules; NOT YET RUN ON A GPU.

The words of a message travel by host memory. The sender first queues a signal behind the packing of the
message, on its stream, and then sends the words; the receiver first has the words, and then queues a wait for
the signal and a copy, on a side stream. So whatever a stream waits for has been queued before, on every
device: a peer that does not come is a time-out of the host, which names it. What is left to the device is a
peer that has queued its signal and never runs it; waits of the device have no time-out, since torch's would
trap and end the process: the watcher names the rank, and `release` ends the waits.
"""

from __future__ import annotations

import time
from contextlib import suppress

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import CommError
from weft.run import streams
from weft.run.comm import Comm, shm
from weft.run.comm.block import Block, Handle, Leave, Source, TorchSource, symmetric_backend
from weft.run.comm.window import HALVES, Late, Window, Words

GRANULE = 1 << 21
"""Bytes that sizes are rounded up to, as CUDA does."""
BARRIER = 0
"""The channel of barriers; messages have the others."""
ENDLESS = 0
"""torch's time-out of a wait that has none."""
ROUNDS, ROUND_SECONDS = 40, 0.05
CLOSE_SECONDS = 5.0
"""For the hosts of the peers to end the last calls."""


class SymmetricWindow(Window):
    """One rank's memory for messages, its peers', and a signal pad for this group and time-out alone.

    A pad belongs to an allocation, and its words are counted by rank and channel of a group, so that two
    groups would meet in one word: hence a small allocation for signals beside the block for messages.
    """

    lands = True

    def __init__(
        self,
        source: Source,
        base: Comm,
        mail: shm.ShmWindow,
        signals: tuple[Tensor, Handle],
    ) -> None:
        self.rank, self.near, self.device_type = mail.rank, mail.near, source.device.type
        self._source, self._base, self._mail, self._device = source, base, mail, source.device
        self._pad_memory, self._signals = signals
        self._channels = self._signals.signal_pad_size // 4 // base.size - 1
        self._block: Block | None = None
        self._half = 0
        self._put, self._waited = dict.fromkeys(self.near, 0), dict.fromkeys(self.near, 0)
        self._in_call = dict.fromkeys(self.near, 0)
        self._under_way: dict[str, streams.Event] = {}
        """The last event of each side stream."""

    def reserve(self, num_bytes: int, timeout: float) -> bool:
        newest = self._source.blocks.get(self._device)
        size, met = (newest.half_bytes, self._source.group in newest.handles) if newest else (0, False)
        rows = self._base.gather_numbers([num_bytes, size, int(met)])
        needed = max(row[0] for row in rows)
        if newest is None or size < needed or any(row[1:] != rows[0][1:] for row in rows):
            # A rank whose memory differs needs another; its group can only meet in new memory of all.
            newest = self._grow(max(max(row[:2]) for row in rows))
        if self._source.group not in newest.handles:
            newest.handles[self._source.group] = self._source.rendezvous(newest.memory)
        if newest is self._block:
            return False
        self._block, newest.half = newest, self._half
        self._await_readers(timeout)  # another group may have written this half last
        return True

    def _grow(self, half_bytes: int) -> Block:
        size, memory, reason = HALVES * (-(-max(half_bytes, 1) // GRANULE) * GRANULE), None, ""
        try:
            memory = self._source.empty(size)
        except RuntimeError as error:
            reason = f" ({_first_line(error)})"
        if late := _without(self._base, ok=memory is not None):
            raise CommError(
                f"Symmetric memory of {size:,} bytes for messages does not fit on rank {late[0]}{reason}.",
                hint="Set WEFT_TRANSPORT=group, or leave more memory of the GPU free.",
            )
        assert memory is not None
        block = self._source.blocks[self._device] = Block(memory)
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
        self._signals.put_signal(peer, self._channel(self._put[peer]), ENDLESS)
        self._mail.put(peer, words, timeout)

    def wait(self, peer: int, timeout: float) -> Words:
        words = self._mail.wait(peer, timeout)
        self._waited[peer] += 1
        # In the order of the peer's stream, so it holds up no other message of this peer.
        with streams.on(streams.side(self._device, "land")):
            self._signals.wait_signal(peer, self._channel(self._waited[peer]), ENDLESS)
        return words

    def land(self, message: Tensor, into: Tensor, ready: streams.Event) -> streams.Event:
        with streams.on(streams.side(self._device, "land")):
            streams.wait(self._device, ready)
            streams.copy(into, message)
            landed = self._under_way["land"] = streams.record(self._device)
        return landed

    def turn(self, call: int, halves: int, timeout: float) -> int:
        self._half = call % halves if self._block is None else self._block.turn(halves)
        if self._block is not None:
            self._await_readers(timeout)
        return self._half

    def _await_readers(self, timeout: float) -> None:
        """Order the stream behind the copies of what a half held; the host waits for their hosts only."""
        assert self._block is not None
        if (last := self._block.last[self._half]) is not None:
            last.mail.barrier(last.call, timeout)
            streams.wait(self._device, last.event)

    def arrive(self, call: int) -> None:
        self._in_call = dict.fromkeys(self.near, 0)
        if self._block is not None:
            ended = streams.record(self._device)  # this stream has waited for every copy of the call
            with streams.on(streams.side(self._device, "leave")):
                streams.wait(self._device, ended)
                self._signals.barrier(BARRIER, ENDLESS)
                left = self._under_way["leave"] = streams.record(self._device)
            self._block.last[self._half] = Leave(self._mail, call, left)
        self._mail.arrive(call)

    def release(self) -> None:
        """End the kernels that wait for signals: give this rank every signal, and take those it puts.

        What they let through is wrong, so the group must have failed before.
        """
        own, others = self._signals.get_signal_pad(self.rank), sorted(self.near)
        at = BARRIER * self._base.size + self.rank
        for _ in range(ROUNDS):  # each wait takes its signal away from the next
            with streams.on(streams.side(self._device, "release")):
                self._signals.memset32(own, 0, 1, own.numel())
                for peer in others:
                    self._signals.stream_write_value32(self._signals.get_signal_pad(peer), at, 0)
            time.sleep(ROUND_SECONDS)
            if all(event.query() for event in self._under_way.values()):
                return

    def close(self) -> None:
        """Give the memory back once the peers have copied what they were sent; a lost peer needs nothing."""
        with suppress(Late, RuntimeError):  # RuntimeError: of a device that has failed
            for last in self._block.last if self._block else ():
                if last is not None:
                    last.mail.barrier(last.call, CLOSE_SECONDS)
                    last.event.synchronize()
        self._block = None
        del self._pad_memory, self._signals

    def _channel(self, number: int) -> int:
        return 1 + number % self._channels


def meet(group: dist.ProcessGroup, base: Comm) -> tuple[Window | None, str]:
    """A window over the GPUs of all ranks, or None and why not; all ranks call it together."""
    mail, reason = shm.meet(base)
    reason = reason or _missing()
    if late := _without(base, ok=not reason):
        return None, reason or f"rank {late[0]} has no symmetric memory"
    assert mail is not None
    source = TorchSource(group, torch.device("cuda", torch.cuda.current_device()))
    return window_of(source, base, mail)


def window_of(source: Source, base: Comm, mail: shm.ShmWindow) -> tuple[SymmetricWindow | None, str]:
    """Try to meet, and agree on whether all ranks could."""
    memory, handle, reason = None, None, ""
    try:
        memory = source.empty(GRANULE)
    except RuntimeError as error:  # no driver API, no handle that another process can open
        reason = _first_line(error)
    if not (late := _without(base, ok=memory is not None)):
        assert memory is not None
        try:
            handle = source.rendezvous(memory)
        except RuntimeError as error:  # no peer access, or two ranks on one GPU
            reason = _first_line(error)
        late = _without(base, ok=handle is not None)
    if late or memory is None or handle is None:
        return None, reason or f"rank {late[0]} has no symmetric memory"
    return SymmetricWindow(source, base, mail, (memory, handle)), ""


def _missing() -> str:
    """Why this process has no symmetric memory; empty if it may have some."""
    if not torch.cuda.is_available():
        return "symmetric memory needs a GPU"
    backend = symmetric_backend(torch.device("cuda", torch.cuda.current_device()))
    return "" if backend in (None, "CUDA") else f"torch has it by {backend}, not by CUDA (TORCH_SYMMMEM=CUDA)"


def _without(base: Comm, *, ok: bool) -> list[int]:
    """The ranks that say no; all ranks ask together."""
    return [rank for rank, (theirs,) in enumerate(base.gather_numbers([int(ok)])) if not theirs]


def _first_line(error: RuntimeError) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
