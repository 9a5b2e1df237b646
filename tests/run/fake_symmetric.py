"""A stand-in for the symmetric memory of GPUs and for side streams, as bad as both may be.

- Memory that nobody holds any more is poisoned (0xFF), and given to the next who asks, as torch's pool does.
  It does not begin where its allocation begins.
- A message is copied at the last moment: when another stream waits for an event behind its copy. Its buffer
  is poisoned until then.
- A signal is a word that is set once and taken once; buffers, pads and channels have bounds.
- A rendezvous is made by all ranks of a group together, and once for each allocation and group.

Threads are ranks: each has streams and memory of its own. The compute stream is the thread itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any
from weakref import WeakValueDictionary, finalize

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.core.errors import CommError
from weft.run import streams
from weft.run.comm import Comm, shm
from weft.run.comm.symmetric import SymmetricWindow, window_of
from weft.run.comm.symmetric_block import SymmetricBlock

streams_copy = streams.copy
POISON = 0xFF
POOL_BYTES = 1 << 22
MARGIN = 512
"""Between the start of an allocation and the tensor in it."""
PATIENCE = 10.0
CPU = torch.device("cpu")


class FakeStream:
    """Work in order. It is done when somebody waits for it, or, if `prompt`, by a thread of its own."""

    def __init__(self, *, prompt: bool) -> None:
        self.prompt, self.done = prompt, list[str]()
        """What has been done, in order."""
        self._work: SimpleQueue[tuple[str, Callable[[], None]]] = SimpleQueue()
        self.error: BaseException | None = None
        if prompt:
            threading.Thread(target=self._run, daemon=True).start()

    def put(self, name: str, work: Callable[[], None]) -> None:
        self._work.put((name, work))

    def next(self) -> None:
        name, work = self._work.get()
        work()
        self.done.append(name)

    def _run(self) -> None:
        try:
            while self.error is None:
                self.next()
        except BaseException as error:  # whoever waits for it raises it
            self.error = error


class FakeEvent:
    """A point of a side stream."""

    def __init__(self, stream: FakeStream) -> None:
        self.stream, self._passed = stream, threading.Event()

    def query(self) -> bool:
        return self._passed.is_set()

    def set(self) -> None:
        self._passed.set()

    def elapsed_time(self, end_event: streams.Event) -> float:
        raise AssertionError(f"{end_event} was not recorded with timing")

    def synchronize(self) -> None:
        while not self.stream.prompt and not self.query():
            self.stream.next()
        assert self._passed.wait(PATIENCE), self.stream.error or "waits for ever"


class FakeStreams:
    """In place of the functions of `weft.run.streams`; each thread has its own side streams."""

    def __init__(self) -> None:
        self._own = threading.local()

    @property
    def sides(self) -> dict[str, FakeStream]:
        return self._own.__dict__.setdefault("sides", {})

    @property
    def current(self) -> FakeStream | None:
        return getattr(self._own, "current", None)

    def submit(self, name: str, work: Callable[[], None]) -> None:
        if self.current is None:
            work()
        else:
            self.current.put(name, work)

    def side(self, device: torch.device, purpose: str) -> FakeStream:
        del device
        if purpose not in self.sides:
            # Barriers must not wait until somebody asks: on other ranks others wait for them.
            self.sides[purpose] = FakeStream(prompt=purpose != "land")
        return self.sides[purpose]

    @contextmanager
    def on(self, stream: FakeStream | None) -> Iterator[None]:
        before, self._own.current = self.current, stream
        try:
            yield
        finally:
            self._own.current = before

    def record(self, device: torch.device, *, timing: bool = False) -> streams.Event:
        del device, timing
        if self.current is None:
            return streams._PASSED
        event = FakeEvent(self.current)
        self.submit("record", event.set)
        return event

    def wait(self, device: torch.device, event: streams.Event) -> None:
        del device
        self.submit("wait", event.synchronize)

    def copy(self, into: Tensor, source: Tensor) -> None:
        if self.current is not None:
            into.fill_(POISON)
        self.submit("copy", lambda: streams_copy(into, source))

    def drain(self) -> None:
        """Do all that is left on the side streams of this thread."""
        for stream in self.sides.values():
            with self.on(stream):
                event = self.record(CPU)
            event.synchronize()


class Pool:
    """The memory of one rank's device."""

    def __init__(self) -> None:
        self.bytes = np.full(POOL_BYTES, POISON, dtype=np.uint8)
        self.held: dict[int, int] = {}
        """Sizes of tensors by their start."""
        self.allocated = 0
        self.blocks: MutableMapping[torch.device, SymmetricBlock] = WeakValueDictionary()

    def empty(self, num_bytes: int) -> Tensor:
        start = MARGIN
        for at in sorted(self.held):
            if start + num_bytes <= at - MARGIN:
                break
            start = at + self.held[at] + MARGIN
        if start + num_bytes > POOL_BYTES:
            raise RuntimeError("CUDA driver error: out of memory")
        self.held[start] = num_bytes
        self.allocated += 1
        owner = self.bytes[start : start + num_bytes]  # lives as long as the storage of the tensor
        finalize(owner, self._free, start, num_bytes)
        return torch.from_numpy(owner)

    def _free(self, start: int, num_bytes: int) -> None:
        del self.held[start]
        self.bytes[start : start + num_bytes] = POISON

    def start_of(self, memory: Tensor) -> int:
        return memory.data_ptr() - self.bytes.ctypes.data


class Board:
    """What the ranks of one group share: who has come, and signal pads by rendezvous."""

    def __init__(self, ranks: int, pad: int = 4 * 4 * 16, fake: FakeStreams | None = None) -> None:
        self.ranks, self.pad_size, self.streams = ranks, pad, fake or FakeStreams()
        self.changed = threading.Condition()
        self.met = threading.Barrier(ranks)
        self.came: dict[int, tuple[Pool, int, int]] = {}
        self.handles: list[FakeHandle] = []
        self.pads: dict[int, Tensor] = {}
        """Of the rendezvous that is made, by rank."""
        self.comms: list[Any] = []
        """Of all ranks, as long as the group lives."""


class FakeSource:
    """One rank's end, for one group."""

    device = CPU

    def __init__(self, board: Board, rank: int, pool: Pool, group: str = "world") -> None:
        self.board, self.rank, self.pool, self.group = board, rank, pool, group
        self.blocks = pool.blocks

    def empty(self, num_bytes: int) -> Tensor:
        return self.pool.empty(num_bytes)

    def rendezvous(self, memory: Tensor) -> FakeHandle:
        board, start = self.board, self.pool.start_of(memory)
        assert start in self.pool.held, "memory that was given back"
        board.came[self.rank] = self.pool, start, memory.numel()
        board.pads[self.rank] = torch.zeros(board.pad_size // 4, dtype=torch.int64)
        board.met.wait(PATIENCE)
        assert len({size for _, _, size in board.came.values()}) == 1, "as large on all ranks"
        handle = FakeHandle(board, self.rank, dict(board.came), dict(board.pads))
        board.handles.append(handle)
        board.met.wait(PATIENCE)
        return handle


class FakeHandle:
    """torch's handle of one rendezvous."""

    offset = MARGIN

    def __init__(
        self, board: Board, rank: int, places: dict[int, tuple[Pool, int, int]], pads: dict[int, Tensor]
    ) -> None:
        self.board, self.rank, self.places, self.pads = board, rank, places, pads
        self.calls: list[str] = []

    @property
    def signal_pad_size(self) -> int:
        return self.board.pad_size

    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype, storage_offset: int) -> Tensor:
        pool, start, size = self.places[rank]
        assert dtype == torch.uint8
        assert MARGIN <= storage_offset <= storage_offset + sizes[0] <= MARGIN + size, "beyond the tensor"
        at = start - MARGIN + storage_offset
        return torch.from_numpy(pool.bytes[at : at + sizes[0]])  # holds nothing that it is a part of

    def get_signal_pad(self, rank: int) -> Tensor:
        return self.pads[rank]

    def barrier(self, channel: int, timeout_ms: int) -> None:
        def meet() -> None:
            for peer in self._others():
                self._put(peer, channel)
            for peer in self._others():
                self._wait(peer, channel)

        self._submit("barrier", meet, timeout_ms)

    def put_signal(self, dst_rank: int, channel: int, timeout_ms: int) -> None:
        self._submit(f"put {dst_rank}", lambda: self._put(dst_rank, channel), timeout_ms)

    def wait_signal(self, src_rank: int, channel: int, timeout_ms: int) -> None:
        self._submit(f"wait {src_rank}", lambda: self._wait(src_rank, channel), timeout_ms)

    def stream_write_value32(self, tensor: Tensor, offset: int, val: int) -> Tensor:
        return self.memset32(tensor, offset, val, 1)

    def memset32(self, tensor: Tensor, offset: int, val: int, count: int) -> Tensor:
        with self.board.changed:  # at once: nothing comes before it on its stream
            tensor[offset : offset + count] = val
            self.board.changed.notify_all()
        return tensor

    def _submit(self, name: str, work: Callable[[], None], timeout_ms: int) -> None:
        assert timeout_ms == 0, "a device that times out ends the process"
        self.calls.append(name)
        self.board.streams.submit(name, work)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.board.ranks) if rank != self.rank]

    def _word(self, channel: int, rank: int) -> int:
        assert 0 <= channel < self.board.pad_size // 4 // self.board.ranks, "a channel that the pad has not"
        return channel * self.board.ranks + rank

    def _put(self, peer: int, channel: int) -> None:
        self._swap(self.pads[peer], self._word(channel, self.rank), 0, 1)

    def _wait(self, peer: int, channel: int) -> None:
        self._swap(self.pads[self.rank], self._word(channel, peer), 1, 0)

    def _swap(self, pad: Tensor, word: int, before: int, after: int) -> None:
        with self.board.changed:
            assert self.board.changed.wait_for(lambda: pad[word] == before, PATIENCE), "waits for ever"
            pad[word] = after
            self.board.changed.notify_all()


def patch_streams(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    fake = FakeStreams()
    for name in ("side", "on", "record", "wait", "copy"):
        monkeypatch.setattr(streams, name, getattr(fake, name))
    return fake


def window(board: Board, base: Comm, pool: Pool | None = None, group: str = "world") -> SymmetricWindow:
    mail, reason = shm.rendezvous(base)
    assert mail is not None, reason
    found, reason = window_of(FakeSource(board, base.rank, pool or Pool(), group), base, mail)
    if found is None:
        raise CommError(reason)
    return found


def parts(found: Any) -> tuple[FakeHandle, Pool]:
    """The handle of the signals of a window, and the memory of its rank."""
    return found._signals, found._source.pool
