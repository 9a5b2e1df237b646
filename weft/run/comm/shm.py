"""Shared memory between the ranks of one machine: a Window over the segments of all of them."""

from __future__ import annotations

import hashlib
import os
import secrets
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
from weft.run.comm.segment import BARRIER, BELL, GIVEN_UP, MAIL, PAGE, TAKEN, Identity, Segment
from weft.run.comm.signals import LINE, library
from weft.run.comm.signals import Words as Line
from weft.run.comm.window import HALVES, Late, Window, Words

LOOK = 0.2  # seconds between looks at whether a peer still lives


class ShmWindow(Window):
    """Segments by rank, this one's own among them. One thread of a rank uses it at a time."""

    device_type = "cpu"

    def __init__(self, rank: int, segments: dict[int, Segment], processes: dict[int, int]) -> None:
        """`processes` are descriptors (pidfd) of the peers' processes, as far as there are any."""
        self.rank, self.near = rank, frozenset(segments) - {rank}
        self._segments, self._processes = segments, processes
        self._memory = {owner: segment.tensor() for owner, segment in segments.items()}
        for process in processes.values():
            finalize(self, os.close, process)
        self._c = library()
        self._mail: dict[int, deque[Words]] = {peer: deque() for peer in self.near}
        self._sent, self._taken = dict.fromkeys(self.near, 0), dict.fromkeys(self.near, 0)
        self._bell = self._line(rank, BELL)

    def allocate(self, half: int, num_bytes: int) -> Tensor:
        self._segments[self.rank].fill(half, num_bytes)
        start = half * self._segments[self.rank].identity.half
        return self._memory[self.rank][start : start + num_bytes]

    def get(self, owner: int, offset: int, num_bytes: int) -> Tensor:
        memory = self._memory.get(owner)
        if memory is None or not 0 <= offset <= offset + num_bytes <= memory.numel():
            raise CommError(f"Bytes {offset} to {offset + num_bytes} of rank {owner} are out of bounds.")
        return memory[offset : offset + num_bytes]

    def place(self, x: Tensor) -> tuple[int, int] | None:
        at = x.data_ptr()
        for owner, segment in self._segments.items():
            if 0 <= at - segment.data < HALVES * segment.identity.half:
                return owner, at - segment.data
        return None

    def put(self, peer: int, words: Words, timeout: float) -> None:
        number = self._sent[peer] = self._sent[peer] + 1
        taken = self._line(peer, TAKEN + self.rank)
        if self._c.weft_get(taken) + MAIL < number:
            self._until(lambda: self._c.weft_get(taken) + MAIL >= number, peer, timeout)
        self._c.weft_write(self._mail_line(peer, self.rank, number), number, Line(*words))
        self._ring(peer)

    def wait(self, peer: int, timeout: float) -> Words:
        mail = self._mail[peer]
        self._until(lambda: bool(mail), peer, timeout)
        return mail.popleft()

    def turn(self, call: int, halves: int, timeout: float) -> int:
        self.barrier(call - halves, timeout)
        return call % halves

    def arrive(self, call: int) -> None:
        self._c.weft_set(self._line(self.rank, BARRIER), call)
        for peer in self.near:
            self._ring(peer)

    def barrier(self, number: int, timeout: float) -> None:
        """Until all near peers have arrived at it."""
        for peer in sorted(self.near):
            line = self._line(peer, BARRIER)
            if self._c.weft_get(line) < number:
                self._until(lambda line=line: self._c.weft_get(line) >= number, peer, timeout)

    def _until(self, ready: Callable[[], bool], peer: int, timeout: float) -> None:
        """Sleep until `ready`; mail is taken in meanwhile, so that two full boxes cannot block each other."""
        began = time.monotonic()
        while True:
            seen = self._c.weft_rung(self._bell)
            self._take_mail()
            if ready():
                return
            left = began + timeout - time.monotonic()
            if reason := "no sign of it in time" if left <= 0 else self._gone(peer):
                self._take_mail()  # what it said just before
                if ready():
                    return
                self.release()
                raise Late(peer, reason)
            self._c.weft_sleep(self._bell, seen, int(min(left, LOOK) * 1e9))

    def _take_mail(self) -> None:
        words = Line()
        for peer in self.near:
            before = number = self._taken[peer]
            while self._c.weft_read(self._mail_line(self.rank, peer, number + 1), number + 1, words):
                number += 1
                self._mail[peer].append(Words(*words[:4]))
            if number > before:
                self._taken[peer] = number
                self._c.weft_set(self._line(self.rank, TAKEN + peer), number)
            if number - before >= MAIL:
                self._ring(peer)  # its box was full, so it may be waiting

    def _ring(self, peer: int) -> None:
        self._c.weft_ring(self._line(peer, BELL))

    def _line(self, owner: int, line: int) -> int:
        return self._segments[owner].control + LINE * line

    def _mail_line(self, owner: int, sender: int, number: int) -> int:
        ranks = self._segments[owner].identity.ranks
        return self._line(owner, TAKEN + ranks + sender * MAIL + number % MAIL)

    def _gone(self, peer: int) -> str:
        """Why nothing will come from a peer any more; empty if it may."""
        if self._c.weft_get(self._line(peer, GIVEN_UP)):
            return "it has given up waiting for another"
        if (process := self._processes.get(peer)) is None:
            return ""
        look = select.poll()
        look.register(process, select.POLLIN)
        return "its process has ended" if look.poll(0) else ""

    def release(self) -> None:
        """Who waits for this rank need not wait until its own time is over too."""
        self._c.weft_set(self._line(self.rank, GIVEN_UP), 1)
        for peer in self.near:
            self._ring(peer)


def missing() -> str:
    """Why this process cannot share memory with others; empty if it can."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create") or not hasattr(os, "pidfd_open"):
        return "shared memory needs Linux 5.3 or later"
    try:
        library()
    except (MissingError, OSError) as error:
        return str(error)
    return ""


def meet(base: Comm) -> tuple[ShmWindow | None, str]:
    """The window of this rank and those on its machine, or None; and why peers are left out, if any are.

    All ranks of the group call it together, and those of one machine come to the same answer.
    """
    reason, own, row = missing(), None, [0] * 5
    if not reason:
        try:
            machine = _machine()
            own = Segment.create(Identity(secrets.randbits(62), base.rank, base.size, _half(base.size)))
            row = [machine, os.getpid(), own.fd, own.identity.run, own.identity.half]
        except OSError as error:
            reason = f"no memory to share: {error}"
    rows = base.gather_numbers(row)
    here = {rank: theirs[1:] for rank, theirs in enumerate(rows) if own and theirs[0] == row[0]}
    window = None
    if own is not None:
        try:
            window = _map(own, here)
        except (OSError, CommError) as error:
            reason = f"rank {base.rank} cannot map the memory of a peer: {error}"
    failed = [rank for rank, (ok,) in enumerate(base.gather_numbers([window is not None])) if not ok]
    if here.keys() & failed:
        return None, reason or f"rank {min(here.keys() & failed)} cannot map the memory of its peers"
    far = [rank for rank in range(base.size) if rank not in here]
    left_out = f"ranks {far} are on other machines, or have none to share" if far else ""
    return (window if len(here) > 1 else None), reason or left_out


def _map(own: Segment, here: dict[int, list[int]]) -> ShmWindow:
    """A window over the segments of all ranks here, by (pid, descriptor, run, half)."""
    rank, ranks = own.identity.rank, own.identity.ranks
    segments, processes = {rank: own}, {}
    try:
        for peer, (pid, fd, run, half) in here.items():
            if peer != rank:
                processes[peer] = os.pidfd_open(pid)  # first: what opens after it proves whose it is
                segments[peer] = Segment.open(f"/proc/{pid}/fd/{fd}", Identity(run, peer, ranks, half))
    except BaseException:
        for process in processes.values():
            os.close(process)
        raise
    return ShmWindow(rank, segments, processes)


def _half(ranks: int) -> int:
    """Bytes of a half: no memory, only addresses, enough for all that a rank could ever send."""
    memory = os.sysconf("SC_PHYS_PAGES") * PAGE
    return 2 * memory // max(8, min(ranks, 64)) // PAGE * PAGE


def _machine() -> int:
    """The same number for processes that can see each other: one kernel, user and set of namespaces.

    A test bed gives each of its machines a network namespace, and nothing else of its own.
    """
    spaces = [str(Path(f"/proc/thread-self/ns/{kind}").readlink()) for kind in ("net", "pid", "user")]
    said = (Path("/proc/sys/kernel/random/boot_id").read_text(), os.geteuid(), *spaces)
    return int.from_bytes(hashlib.sha256(repr(said).encode()).digest()[:7], "big") + 1
