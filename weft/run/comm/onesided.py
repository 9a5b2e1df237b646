"""One-sided messages: written once in the sender's memory and read there, by peers that share a window.

A message costs a few words: where it lies. A ring that passes one on passes these words. Peers that are
not in the window are served by the process group. On CPUs messages are used where they lie; on GPUs each is
copied once to the buffer of its receiver, on a side stream.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.errors import CommError
from weft.run import streams
from weft.run.comm import Borrower, Comm, Message, Transit, rollcall
from weft.run.comm.group import GroupComm
from weft.run.comm.watcher import Watcher
from weft.run.comm.window import HALVES, Late, Window, Words

ALIGN = 256
Meet = Callable[[Comm], tuple[Window | None, str]]


class OneSidedComm:
    """`base` is for agreement and for peers out of reach; the window is made by the first call.

    sync    when a rank may write its memory again.
            barrier: calls alternate between two halves, so a call waits only for peers that are still in
            the call before the last. flags: one half, so every peer must have left the last call.
    """

    def __init__(
        self,
        base: Comm,
        meet: Meet,
        timeout: float,
        *,
        group: dist.ProcessGroup | None = None,
        sync: str = "barrier",
        strict: bool = False,
        transport: str = "shm",
    ) -> None:
        self.transport, self.base, self.timeout, self.group = transport, base, timeout, group
        self.rank, self.size, self.bytes_sent = base.rank, base.size, 0
        self.window: Window | None = None
        self.reason = "no call yet"
        self._meet, self._strict = meet, strict
        self.watcher: Watcher | None = None
        """Sees who is late where streams wait, which the host does not."""
        self._halves = HALVES if sync == "barrier" else 1
        self._lent: list[Half] = []
        self._met = False
        self.calls = 0
        self._boxes: defaultdict[tuple[int, int], _Box] = defaultdict(_Box)
        """By peer and tag, while a message is under way: plans come and go without end."""
        self._landed: dict[int, Words] = {}
        """Messages of this call that were copied, by the address of the copy: what is passed on is theirs."""
        self.borrowers: WeakSet[Borrower] = WeakSet()

    def begin(self, device: torch.device) -> Half | None:
        self.base.begin(device)
        if not self._met:
            self.window, self.reason = self._meet(self.base)
            self._met = True
            if self.window is not None and self.window.lands and isinstance(self.base, GroupComm):
                self.watcher = self.base.watcher
                self.watcher.on_failure.append(self.window.release)
        if self._strict and self.reason:
            hint = "Use transport='auto' (WEFT_TRANSPORT=auto)."
            raise CommError(f"Not all ranks share memory: {self.reason}.", hint=hint)
        window = self.window
        if window is None or device.type != window.device_type:
            return None
        if not self._lent:
            self._lent = [Half(self, window, number) for number in range(self._halves)]
        self.calls += 1
        self._landed.clear()
        try:
            half = window.turn(self.calls, self._halves, self.timeout)
        except Late as late:
            raise self.late(late, "op 0 (leave to write again)", self.timeout) from late
        return self._lent[half]

    def close(self) -> None:
        """Give the memory back; the ranks would have to meet again."""
        for borrower in self.borrowers:
            borrower.unbind()
        if self.window is not None:
            self.window.close()
        self.window, self._lent, self._met = None, [], False

    def end(self) -> None:
        assert self.window is not None
        self.window.arrive(self.calls)

    def post(self, sends: list[Message], receives: list[Message], label: str, tag: int) -> Transit:
        self.bytes_sent += sum(buffer.numel() * buffer.element_size() for _, buffer in sends)
        window = self.window
        if window is None or any(
            x.device.type not in (window.device_type, "meta") for _, x in sends + receives
        ):
            return self.base.post(sends, receives, label, tag)
        near = window.near
        far_sends, far_receives = ([m for m in some if m[0] not in near] for some in (sends, receives))
        by_group = None
        if far_sends or far_receives:
            by_group = self.base.post(far_sends, far_receives, label, tag)
        messages = sends or receives
        device = messages[0][1].device if messages else torch.device("cpu")
        ready = streams.record(device)
        going = [message for message in sends if message[0] in near]
        for peer, buffer in going:
            self._tell(window, peer, buffer, label, tag)
        if going:
            self.watch(streams.record(device), ready, label, [(rollcall.SEND, peer) for peer, _ in going])
        coming: dict[int, tuple[int, Tensor]] = {}
        for peer, buffer in receives:
            if peer in near:
                box = self._boxes[peer, tag]
                box.expected += 1
                coming[peer] = box.expected, buffer
        return OneSidedTransit(self, (label, tag, ready), coming, dict(far_receives), by_group)

    def warm_up(self, device: torch.device) -> None:
        self.base.warm_up(device)

    def collective(self, device: torch.device) -> bool:
        """A window may join some ranks only; the group serves all of them where it joins none."""
        return device.type != "cpu" and self.base.collective(device)

    def all_to_all(self, sends: list[Message], receives: list[Message], label: str) -> Transit:
        before = self.base.bytes_sent
        transit = self.base.all_to_all(sends, receives, label)
        self.bytes_sent += self.base.bytes_sent - before
        return transit

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        return self.base.gather_numbers(numbers)

    def _tell(self, window: Window, peer: int, buffer: Tensor, label: str, tag: int) -> None:
        place = window.place(buffer) or self._origin(buffer)
        if place is None:
            raise CommError(f"{label}: the message to rank {peer} is not in memory that begin() lent.")
        try:
            window.put(peer, Words(tag, *place, buffer.numel()), self.timeout)
        except Late as late:
            raise self.late(late, label, self.timeout, way="to") from late

    def _origin(self, buffer: Tensor) -> tuple[int, int] | None:
        """Where the message lies of which a buffer is a copy, or a part of one."""
        for at, words in self._landed.items():
            offset = buffer.data_ptr() - at
            if offset >= 0 and offset + buffer.numel() <= words.num_bytes:
                return words.owner, words.offset + offset
        return None

    def note_copy(self, buffer: Tensor, words: Words) -> None:
        """Remember what a buffer is a copy of; what else was copied to its bytes is there no more."""
        start, end = buffer.data_ptr(), buffer.data_ptr() + words.num_bytes
        for at, other in list(self._landed.items()):
            if at < end and start < at + other.num_bytes:
                del self._landed[at]
        self._landed[start] = words

    def watch(
        self, done: streams.Event, ready: streams.Event, label: str, messages: list[rollcall.Message]
    ) -> None:
        if self.watcher is not None:
            self.watcher.watch([_Point(done)], ready, label, messages, self.timeout)

    def words(self, peer: int, label: str, tag: int, number: int) -> Words:
        """Those of the n-th message from a peer and tag, of all that are under way together."""
        assert self.window is not None
        began, box = time.monotonic(), self._boxes[peer, tag]
        while number not in box.words:
            try:
                words = self.window.wait(peer, began + self.timeout - time.monotonic())
            except Late as late:
                raise self.late(late, label, time.monotonic() - began) from late
            found = self._boxes[peer, words.tag]
            found.arrived += 1
            found.words[found.arrived] = words
            if found.arrived > found.expected:  # it comes in order, so what is waited for never will
                raise self.late(Late(peer, "it runs another call"), label, time.monotonic() - began)
        words = box.words.pop(number)
        if not box.words and box.arrived == box.expected:
            del self._boxes[peer, tag]
        return words

    def late(self, late: Late, label: str, seconds: float, way: str = "from") -> CommError:
        """The error of a late peer. Streams that wait for it too are let go on, or no host could end."""
        assert self.window is not None
        self.window.release()
        what = f"Rank {self.rank} waited {seconds:.1f} s for {label} {way} rank {late.peer}: {late}."
        return CommError(what, hint="That rank is lost, stuck or late; look at its own error first.")


@dataclass
class _Box:
    """Messages of one tag from one peer: how many were asked for and have come, and those not yet taken."""

    expected: int = 0
    arrived: int = 0
    words: dict[int, Words] = field(default_factory=dict)


class _Point(NamedTuple):
    """An event, as the watcher polls it."""

    event: streams.Event

    def is_completed(self) -> bool:
        return self.event.query()


class Half:
    """Memory that one call writes its messages into."""

    def __init__(self, comm: OneSidedComm, window: Window, number: int) -> None:
        self.near, self.lands, self.end = window.near, window.lands, comm.end
        self._comm, self._window, self._number = comm, window, number

    def reserve(self, num_bytes: int) -> None:
        try:
            has_moved = self._window.reserve(num_bytes, self._comm.timeout)
        except Late as late:
            raise self._comm.late(late, "op 0 (leave to write again)", self._comm.timeout) from late
        for borrower in self._comm.borrowers if has_moved else ():
            borrower.unbind()

    def lend(self, sizes: dict[str, int], borrower: Borrower | None = None) -> dict[str, Tensor]:
        """Buffers for a program's messages, aligned and apart."""
        if borrower is not None:
            self._comm.borrowers.add(borrower)
        ends = list(accumulate(-(-size // ALIGN) * ALIGN for size in sizes.values()))
        block = self._window.allocate(self._number, ends[-1] if ends else 0)
        starts = [0, *ends]
        return {name: block[at : at + size] for (name, size), at in zip(sizes.items(), starts, strict=False)}


class OneSidedTransit:
    """Messages of one post. Those in the window stay there until the call ends: no send is awaited."""

    def __init__(
        self,
        comm: OneSidedComm,
        what: tuple[str, int, streams.Event],
        coming: dict[int, tuple[int, Tensor]],
        received: dict[int, Tensor],
        by_group: Transit | None,
    ) -> None:
        self.comm, self.coming, self.received, self.by_group = comm, coming, received, by_group
        self.label, self.tag, self.ready = what

    def wait_for(self, peer: int) -> Tensor | None:
        if self.by_group is not None and peer in self.received:
            self.by_group.wait_for(peer)
            return self.received[peer]
        if peer not in self.coming:
            return None
        number, buffer = self.coming.pop(peer)
        words = self.comm.words(peer, self.label, self.tag, number)
        window = self.comm.window
        assert window is not None
        found = window.get(words.owner, words.offset, words.num_bytes)
        if found.numel() != buffer.numel():
            raise CommError(
                f"{self.label}: rank {peer} sent {found.numel()} bytes, expected {buffer.numel()}.",
                hint="The ranks run different plans.",
            )
        if window.lands:
            done = window.land(found, buffer, self.ready)
            self.comm.watch(done, self.ready, self.label, [(rollcall.RECEIVE, peer)])
            self.comm.note_copy(buffer, words)
            streams.wait(buffer.device, done)
            return buffer
        return found

    def wait_sent(self, peer: int) -> None:
        """What lies in the window is read there until the call ends; only others have buffers to wait for."""
        if self.by_group is not None:
            self.by_group.wait_sent(peer)

    def finish(self) -> None:
        for peer in list(self.coming):
            self.wait_for(peer)
        if self.by_group is not None:
            self.by_group.finish()
