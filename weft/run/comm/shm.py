"""Shared memory between the ranks of one machine: a Window over the segments of all of them."""

from __future__ import annotations

import hashlib
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from weakref import finalize

from torch import Tensor

from weft.core.errors import CommError, MissingError
from weft.run.comm import Comm
from weft.run.comm.shared_segment import ABORTED, BARRIER, DOORBELL, MAILBOX_SLOTS, SegmentInfo, SharedSegment
from weft.run.comm.signals import Line, library
from weft.run.comm.window import HALVES, Descriptor, LatePeerError, Window

LIVENESS_SECONDS = 0.2
"""Between checks whether a peer still lives."""


class ShmWindow(Window):
    """A window over `segments`, by rank, this rank's among them. Not thread-safe."""

    device_type = "cpu"

    def __init__(self, rank: int, segments: dict[int, SharedSegment], processes: dict[int, int]) -> None:
        """`processes` are file descriptors (pidfd) of the processes of peers, where there are any."""
        self.rank, self.near = rank, frozenset(segments) - {rank}
        self._segments, self._processes = segments, processes
        self._memory = {owner: segment.tensor() for owner, segment in segments.items()}
        for process in processes.values():
            finalize(self, os.close, process)
        self._c = library()
        self._mailbox: dict[int, deque[Descriptor]] = {peer: deque() for peer in self.near}
        self._sent, self._taken = dict.fromkeys(self.near, 0), dict.fromkeys(self.near, 0)
        self._doorbell = segments[rank].line(DOORBELL)

    def allocate(self, half: int, num_bytes: int) -> Tensor:
        self._segments[self.rank].fill(half, num_bytes)
        start = half * self._segments[self.rank].info.half
        return self._memory[self.rank][start : start + num_bytes]

    def get(self, owner: int, offset: int, num_bytes: int) -> Tensor:
        memory = self._memory.get(owner)
        if memory is None or not 0 <= offset <= offset + num_bytes <= memory.numel():
            raise CommError(f"Bytes {offset} to {offset + num_bytes} of rank {owner} are out of bounds.")
        return memory[offset : offset + num_bytes]

    def place(self, x: Tensor) -> tuple[int, int] | None:
        at = x.data_ptr()
        for owner, segment in self._segments.items():
            if 0 <= at - segment.data < HALVES * segment.info.half:
                return owner, at - segment.data
        return None

    def put(self, peer: int, descriptor: Descriptor, timeout: float) -> None:
        number = self._sent[peer] = self._sent[peer] + 1
        taken = self._segments[peer].taken(self.rank)
        if self._c.weft_get(taken) + MAILBOX_SLOTS < number:
            self._until(lambda: self._c.weft_get(taken) + MAILBOX_SLOTS >= number, peer, timeout)
        self._c.weft_write(self._segments[peer].slot(self.rank, number), number, Line(*descriptor))
        self._notify(peer)

    def wait(self, peer: int, timeout: float) -> Descriptor:
        mailbox = self._mailbox[peer]
        self._until(lambda: bool(mailbox), peer, timeout)
        return mailbox.popleft()

    def turn(self, call: int, timeout: float) -> int:
        self.barrier(call - HALVES, timeout)
        return call % HALVES

    def arrive(self, call: int) -> None:
        self._c.weft_set(self._segments[self.rank].line(BARRIER), call)
        for peer in self.near:
            self._notify(peer)

    def barrier(self, number: int, timeout: float) -> None:
        """Wait until all near peers have arrived at a call."""
        for peer in sorted(self.near):
            line = self._segments[peer].line(BARRIER)
            if self._c.weft_get(line) < number:
                self._until(lambda line=line: self._c.weft_get(line) >= number, peer, timeout)

    def _until(self, ready: Callable[[], bool], peer: int, timeout: float) -> None:
        """Sleep until `ready`; drain mailboxes meanwhile, so that two full ones cannot block each other."""
        start = time.monotonic()
        while True:
            rung = self._c.weft_rung(self._doorbell)
            self._drain_mailboxes()
            if ready():
                return
            left = start + timeout - time.monotonic()
            if reason := "no sign of it in time" if left <= 0 else self._gone(peer):
                self._drain_mailboxes()  # what it sent just before
                if ready():
                    return
                self.release()
                raise LatePeerError(peer, reason)
            self._c.weft_sleep(self._doorbell, rung, int(min(left, LIVENESS_SECONDS) * 1e9))

    def _drain_mailboxes(self) -> None:
        line, own = Line(), self._segments[self.rank]
        for peer in self.near:
            before = number = self._taken[peer]
            while self._c.weft_read(own.slot(peer, number + 1), number + 1, line):
                number += 1
                self._mailbox[peer].append(Descriptor(*line[:4]))
            if number > before:
                self._taken[peer] = number
                self._c.weft_set(own.taken(peer), number)
            if number - before >= MAILBOX_SLOTS:
                self._notify(peer)  # its mailbox was full, so it may be waiting

    def _notify(self, peer: int) -> None:
        self._c.weft_ring(self._segments[peer].line(DOORBELL))

    def _gone(self, peer: int) -> str:
        """Return why nothing more can come from a peer; "" if it can."""
        if self._c.weft_get(self._segments[peer].line(ABORTED)):
            return "it has given up waiting for another"
        if (process := self._processes.get(peer)) is None:
            return ""
        poll = select.poll()
        poll.register(process, select.POLLIN)
        return "its process has ended" if poll.poll(0) else ""

    def release(self) -> None:
        """Wake the peers that wait for this rank, so that they fail now and not at their own timeout."""
        self._c.weft_set(self._segments[self.rank].line(ABORTED), 1)
        for peer in self.near:
            self._notify(peer)


def unavailable_reason() -> str:
    """Return why this process cannot share memory with others; "" if it can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "shared memory needs Linux 5.3 or later"
    try:
        library()
    except (MissingError, OSError) as error:
        return str(error)
    return ""


def rendezvous(base: Comm) -> tuple[ShmWindow | None, str]:
    """Return the window of the ranks on this machine, or None; and why it lacks peers, if it does.

    All ranks of the group call it together; those of one machine return the same.
    """
    reason, own, row = unavailable_reason(), None, [0] * 5
    if not reason:
        try:
            machine = _machine()
            own = SharedSegment.create(SegmentInfo.new(base.rank, base.size))
            row = [machine, os.getpid(), own.fd, own.info.run, own.info.half]
        except OSError as error:
            reason = f"no memory to share: {error}"
    rows = base.all_gather_ints(row)
    here = {rank: other[1:] for rank, other in enumerate(rows) if own and other[0] == row[0]}
    window = None
    if own is not None:
        try:
            window = _map(own, here)
        except (OSError, CommError) as error:
            reason = f"rank {base.rank} cannot map the memory of a peer: {error}"
    failed = [rank for rank, (ok,) in enumerate(base.all_gather_ints([window is not None])) if not ok]
    if here.keys() & failed:
        return None, reason or f"rank {min(here.keys() & failed)} cannot map the memory of its peers"
    far = [rank for rank in range(base.size) if rank not in here]
    left_out = f"ranks {far} are on other machines, or have none to share" if far else ""
    return (window if len(here) > 1 else None), reason or left_out


def _map(own: SharedSegment, here: dict[int, list[int]]) -> ShmWindow:
    """Return a window over the segments of the ranks `here`, given (pid, fd, run, half)."""
    rank, ranks = own.info.rank, own.info.ranks
    segments, processes = {rank: own}, {}
    try:
        for peer, (pid, fd, run, half) in here.items():
            if peer != rank:
                # The pidfd first: the path opened after it is then of this process.
                processes[peer] = os.pidfd_open(pid)
                info = SegmentInfo(run, peer, ranks, half)
                segments[peer] = SharedSegment.open(f"/proc/{pid}/fd/{fd}", info)
    except BaseException:
        for process in processes.values():
            os.close(process)
        raise
    return ShmWindow(rank, segments, processes)


def _machine() -> int:
    """Return a number that is equal for processes with the same kernel, user and set of namespaces.

    The machines of a test bed differ in their network namespace only.
    """
    spaces = [str(Path(f"/proc/thread-self/ns/{kind}").readlink()) for kind in ("net", "pid", "user")]
    identity = (Path("/proc/sys/kernel/random/boot_id").read_text(), os.geteuid(), *spaces)
    return int.from_bytes(hashlib.sha256(repr(identity).encode()).digest()[:7], "big") + 1
