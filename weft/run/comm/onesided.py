"""One-sided messages: written once in the sender's memory and read there, by peers that share a window.

Only a descriptor is sent, with the location of the message; a ring forwards the descriptor. Peers outside
the window are served by the process group. On CPUs messages are used in place; on GPUs each is copied once
to the buffer of its receiver, on a side stream.
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
from weft.run.comm import LATE_HINT, Borrower, Comm, Message, PendingExchange, rollcall
from weft.run.comm.group import GroupComm
from weft.run.comm.watcher import Watcher
from weft.run.comm.window import HALVES, Descriptor, LatePeerError, Window

ALIGN = 256
Rendezvous = Callable[[Comm], tuple[Window | None, str]]


class OneSidedComm:
    """`base` serves agreement and peers outside the window, which the first call makes.

    Calls alternate between two halves of a rank's memory, so a call waits only for peers that are in the
    call before the last.
    """

    def __init__(
        self,
        base: Comm,
        rendezvous: Rendezvous,
        timeout: float,
        *,
        group: dist.ProcessGroup | None = None,
        strict: bool = False,
        transport: str = "shm",
    ) -> None:
        self.transport, self.base, self.timeout, self.group = transport, base, timeout, group
        self.rank, self.size, self.bytes_sent = base.rank, base.size, 0
        self.window: Window | None = None
        self.reason = "no call yet"
        self._rendezvous, self._strict = rendezvous, strict
        self.watcher: Watcher | None = None
        """Finds late ranks where streams wait and the host does not."""
        self._lent: list[CallMemory] = []
        self._is_met = False
        self.calls = 0
        self._inboxes: defaultdict[tuple[int, int], _Inbox] = defaultdict(_Inbox)
        """By peer and tag, while a message is under way."""
        self._landed: dict[int, Descriptor] = {}
        """Messages of this call by the address of their copy: forwarding a copy sends this descriptor."""
        self.borrowers: WeakSet[Borrower] = WeakSet()

    def begin(self, device: torch.device) -> CallMemory | None:
        self.base.begin(device)
        if not self._is_met:
            self.window, self.reason = self._rendezvous(self.base)
            self._is_met = True
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
            self._lent = [CallMemory(self, window, number) for number in range(HALVES)]
        self.calls += 1
        self._landed.clear()
        try:
            half = window.turn(self.calls, self.timeout)
        except LatePeerError as late:
            raise self.late(late, "op 0 (leave to write again)", self.timeout) from late
        return self._lent[half]

    def close(self) -> None:
        """Free the memory; the next call makes a new window."""
        for borrower in self.borrowers:
            borrower.unbind()
        if self.window is not None:
            self.window.close()
        self.window, self._lent, self._is_met = None, [], False

    def end(self) -> None:
        assert self.window is not None
        self.window.arrive(self.calls)

    def post(self, sends: list[Message], receives: list[Message], label: str, tag: int) -> PendingExchange:
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
            self._put(window, peer, buffer, label, tag)
        if going:
            self.watch(streams.record(device), ready, label, [(rollcall.SEND, peer) for peer, _ in going])
        coming: dict[int, tuple[int, Tensor]] = {}
        for peer, buffer in receives:
            if peer in near:
                inbox = self._inboxes[peer, tag]
                inbox.expected += 1
                coming[peer] = inbox.expected, buffer
        return OneSidedExchange(self, (label, tag, ready), coming, dict(far_receives), by_group)

    def warm_up(self, device: torch.device) -> None:
        self.base.warm_up(device)

    def collective(self, device: torch.device) -> bool:
        """A window may join some ranks only; without one the group serves all of them."""
        return device.type != "cpu" and self.base.collective(device)

    def all_to_all(self, sends: list[Message], receives: list[Message], label: str) -> PendingExchange:
        before = self.base.bytes_sent
        transit = self.base.all_to_all(sends, receives, label)
        self.bytes_sent += self.base.bytes_sent - before
        return transit

    def all_gather_ints(self, numbers: list[int]) -> list[list[int]]:
        return self.base.all_gather_ints(numbers)

    def _put(self, window: Window, peer: int, buffer: Tensor, label: str, tag: int) -> None:
        place = window.place(buffer) or self._origin(buffer)
        if place is None:
            raise CommError(f"{label}: the message to rank {peer} must lie in memory that begin() lent.")
        try:
            window.put(peer, Descriptor(tag, *place, buffer.numel()), self.timeout)
        except LatePeerError as late:
            raise self.late(late, label, self.timeout, direction="to") from late

    def _origin(self, buffer: Tensor) -> tuple[int, int] | None:
        """Return where the message lies of which a buffer is a copy, or part of a copy."""
        for start, message in self._landed.items():
            offset = buffer.data_ptr() - start
            if offset >= 0 and offset + buffer.numel() <= message.num_bytes:
                return message.owner, message.offset + offset
        return None

    def note_copy(self, buffer: Tensor, message: Descriptor) -> None:
        """Record of which message a buffer is a copy; drop earlier copies that it overwrites."""
        start, end = buffer.data_ptr(), buffer.data_ptr() + message.num_bytes
        for other, earlier in list(self._landed.items()):
            if other < end and start < other + earlier.num_bytes:
                del self._landed[other]
        self._landed[start] = message

    def watch(
        self, done: streams.Event, ready: streams.Event, label: str, messages: list[rollcall.Endpoint]
    ) -> None:
        if self.watcher is not None:
            self.watcher.watch([_EventWork(done)], ready, label, messages, self.timeout)

    def receive(self, peer: int, label: str, tag: int, number: int) -> Descriptor:
        """Wait for the n-th of the messages of a peer and tag that are under way together."""
        assert self.window is not None
        start, inbox = time.monotonic(), self._inboxes[peer, tag]
        while number not in inbox.messages:
            try:
                message = self.window.wait(peer, start + self.timeout - time.monotonic())
            except LatePeerError as late:
                raise self.late(late, label, time.monotonic() - start) from late
            other = self._inboxes[peer, message.tag]
            other.arrived += 1
            other.messages[other.arrived] = message
            if other.arrived > other.expected:  # messages arrive in order, so the expected one never will
                raise self.late(LatePeerError(peer, "it runs another call"), label, time.monotonic() - start)
        message = inbox.messages.pop(number)
        if not inbox.messages and inbox.arrived == inbox.expected:
            del self._inboxes[peer, tag]
        return message

    def late(self, late: LatePeerError, label: str, seconds: float, direction: str = "from") -> CommError:
        """Return the error of a late peer, and end the waits of streams for it, or no host could end."""
        assert self.window is not None
        self.window.release()
        what = f"Rank {self.rank} waited {seconds:.1f} s for {label} {direction} rank {late.peer}: {late}."
        return CommError(what, hint=LATE_HINT)


@dataclass
class _Inbox:
    """Messages of one tag from one peer: counts of those expected and arrived, and those not yet read."""

    expected: int = 0
    arrived: int = 0
    messages: dict[int, Descriptor] = field(default_factory=dict)


class _EventWork(NamedTuple):
    """An event with the interface that the watcher polls."""

    event: streams.Event

    def is_completed(self) -> bool:
        return self.event.query()


class CallMemory:
    """The half of a window that one call writes its messages into."""

    def __init__(self, comm: OneSidedComm, window: Window, number: int) -> None:
        self.near, self.lands, self.end = window.near, window.lands, comm.end
        self._comm, self._window, self._number = comm, window, number

    def reserve(self, num_bytes: int) -> None:
        try:
            has_moved = self._window.reserve(num_bytes, self._comm.timeout)
        except LatePeerError as late:
            raise self._comm.late(late, "op 0 (leave to write again)", self._comm.timeout) from late
        for borrower in self._comm.borrowers if has_moved else ():
            borrower.unbind()

    def lend(self, sizes: dict[str, int], borrower: Borrower | None = None) -> dict[str, Tensor]:
        """Return aligned buffers for the messages of a program."""
        if borrower is not None:
            self._comm.borrowers.add(borrower)
        ends = list(accumulate(-(-size // ALIGN) * ALIGN for size in sizes.values()))
        block = self._window.allocate(self._number, ends[-1] if ends else 0)
        starts = [0, *ends]
        return {name: block[at : at + size] for (name, size), at in zip(sizes.items(), starts, strict=False)}


class OneSidedExchange:
    """Messages of one post. Those in the window stay until the call ends, so sends are not waited for."""

    def __init__(
        self,
        comm: OneSidedComm,
        post: tuple[str, int, streams.Event],
        coming: dict[int, tuple[int, Tensor]],
        received: dict[int, Tensor],
        by_group: PendingExchange | None,
    ) -> None:
        self.comm, self.coming, self.received, self.by_group = comm, coming, received, by_group
        self.label, self.tag, self.ready = post

    def wait_for(self, peer: int) -> Tensor | None:
        if self.by_group is not None and peer in self.received:
            self.by_group.wait_for(peer)
            return self.received[peer]
        if peer not in self.coming:
            return None
        number, buffer = self.coming.pop(peer)
        message = self.comm.receive(peer, self.label, self.tag, number)
        window = self.comm.window
        assert window is not None
        view = window.get(message.owner, message.offset, message.num_bytes)
        if view.numel() != buffer.numel():
            raise CommError(
                f"{self.label}: rank {peer} sent {view.numel()} bytes, expected {buffer.numel()}.",
                hint="The ranks run different plans.",
            )
        if not window.lands:
            return view
        done = window.land(view, buffer, self.ready)
        self.comm.watch(done, self.ready, self.label, [(rollcall.RECEIVE, peer)])
        self.comm.note_copy(buffer, message)
        streams.wait(buffer.device, done)
        return buffer

    def wait_sent(self, peer: int) -> None:
        if self.by_group is not None:
            self.by_group.wait_sent(peer)

    def finish(self) -> None:
        for peer in list(self.coming):
            self.wait_for(peer)
        if self.by_group is not None:
            self.by_group.finish()
