"""Shared segment: the send memory of one rank in an anonymous file (memfd), which its peers check, then map.

A memfd is freed when the last process that maps it exits or is killed, so nothing has to be cleaned up, and
it has no file name that could clash with another run. Peers of the same user open it through /proc. Its size
is sealed at creation, so an access to the mapping cannot fall beyond the end of the file (SIGBUS).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import secrets
import struct
from dataclasses import dataclass
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import CommError
from weft.run.comm.signals import LINE_BYTES

HEADER = struct.Struct("=8s5q")
MAGIC = b"weft shm"
# Control lines of LINE_BYTES: header, doorbell, barrier, aborted, descriptors read per peer, mailboxes.
DOORBELL, BARRIER, ABORTED, TAKEN = 1, 2, 3, 4
MAILBOX_SLOTS = 64
"""Descriptors that one rank can have in flight to another."""
PAGE = mmap.ALLOCATIONGRANULARITY


@dataclass(frozen=True)
class SegmentInfo:
    """The header of a segment; before mapping, a peer compares it with what the owner has sent."""

    run: int
    """A random id, drawn when the segment is described."""
    rank: int
    ranks: int
    half: int
    """Bytes of each of the two halves of the data; pages never touched take no memory."""

    @staticmethod
    def new(rank: int, ranks: int) -> SegmentInfo:
        """Describe a new segment whose halves (address space, not memory) hold all that a rank can send."""
        memory = os.sysconf("SC_PHYS_PAGES") * PAGE
        half = 2 * memory // max(8, min(ranks, 64)) // PAGE * PAGE
        return SegmentInfo(secrets.randbits(62), rank, ranks, half)

    @property
    def control(self) -> int:
        """Bytes of the control lines, which precede the first half."""
        return -(-LINE_BYTES * (TAKEN + self.ranks + self.ranks * MAILBOX_SLOTS) // PAGE) * PAGE

    @property
    def size(self) -> int:
        return self.control + 2 * self.half

    def header(self) -> bytes:
        return HEADER.pack(MAGIC, self.run, self.rank, self.ranks, self.half, os.geteuid())


class SharedSegment:
    """A mapped segment: all ranks write at the address `control`, only its owner at `data`."""

    def __init__(self, fd: int, info: SegmentInfo, *, own: bool) -> None:
        self.info, self.fd = info, fd
        self._maps = [mmap.mmap(fd, info.control)]
        protection = mmap.PROT_READ | mmap.PROT_WRITE if own else mmap.PROT_READ
        size = 2 * info.half
        self._maps.append(mmap.mmap(fd, size, prot=protection, offset=info.control))
        self.control, self.data = (np.frombuffer(m, dtype=np.uint8).ctypes.data for m in self._maps)
        self._filled = [0, 0]

    def line(self, number: int) -> int:
        """Return the address of a control line."""
        return self.control + LINE_BYTES * number

    def taken(self, sender: int) -> int:
        """Return the address of the counter of descriptors read from a sender."""
        return self.line(TAKEN + sender)

    def slot(self, sender: int, number: int) -> int:
        """Return the address of the mailbox slot of the n-th descriptor from a sender."""
        return self.line(TAKEN + self.info.ranks + sender * MAILBOX_SLOTS + number % MAILBOX_SLOTS)

    def tensor(self) -> Tensor:
        """Return both halves as bytes; through ctypes, torch does not warn that a peer's are read-only."""
        halves = (ctypes.c_uint8 * (2 * self.info.half)).from_address(self.data)
        vars(halves)["mapped"] = self._maps  # keep it mapped as long as the tensor lives
        return torch.frombuffer(halves, dtype=torch.uint8)

    @staticmethod
    def create(info: SegmentInfo) -> SharedSegment:
        fd = os.memfd_create("weft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, info.size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.pwrite(fd, info.header(), 0)
        segment = SharedSegment(fd, info, own=True)
        finalize(segment, os.close, fd)
        return segment

    @staticmethod
    def open(path: str, info: SegmentInfo) -> SharedSegment:
        """Open the segment of a peer; raise before mapping it if it does not match `info`."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            _check(fd, info)
            return SharedSegment(fd, info, own=False)
        finally:
            os.close(fd)

    def fill(self, half: int, num_bytes: int) -> None:
        """Allocate the first bytes of a half, so that a lack of memory raises here, not as SIGBUS later."""
        if num_bytes <= self._filled[half]:
            return
        limit = self.info.half
        try:
            if num_bytes > limit:
                raise OSError(f"a half has {limit} bytes")
            start = self.info.control + half * limit + self._filled[half]
            os.posix_fallocate(self.fd, start, num_bytes - self._filled[half])
        except OSError as error:
            raise CommError(
                f"No shared memory for {num_bytes} bytes of messages: {error.strerror or error}.",
                hint="Use fewer ranks or shorter sequences, or transport='group' (WEFT_TRANSPORT=group).",
            ) from error
        self._filled[half] = num_bytes


def _check(fd: int, info: SegmentInfo) -> None:
    stat = os.fstat(fd)
    if stat.st_uid != os.geteuid() or stat.st_mode & 0o077:
        raise CommError(f"Rank {info.rank}'s segment must be accessible to this user only.")
    if stat.st_size != info.size:
        raise CommError(f"Rank {info.rank}'s segment has {stat.st_size} bytes, expected {info.size}.")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise CommError(f"Rank {info.rank}'s segment must be sealed against shrinking.")
    if os.pread(fd, HEADER.size, 0) != info.header():
        raise CommError(f"Rank {info.rank}'s segment belongs to another run.")
