"""Segment: one rank's memory as a file without a name, and how a peer maps it after looking at it.

A memfd has no name in any directory: it goes when the last process that maps it goes, however that ends,
so there is nothing to clean up and nothing of a dead run to find. Peers of the same user open it through
/proc. Its size is sealed when it is made, so no access can ever lie beyond its end.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
from dataclasses import dataclass
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import CommError
from weft.run.comm.signals import LINE

HEADER = struct.Struct("=8s5q")
MAGIC = b"weft shm"
# Lines of a segment: header, bell, barrier, whether it gave up, what it took from each peer, its mail.
BELL, BARRIER, GIVEN_UP, TAKEN = 1, 2, 3, 4
MAIL = 64
"""Words that may be under way from one rank to another."""
PAGE = mmap.ALLOCATIONGRANULARITY


@dataclass(frozen=True)
class Identity:
    """What a segment says of itself, and what its peers have been told about it."""

    run: int
    """A random number of the process that made it."""
    rank: int
    ranks: int
    half: int
    """Bytes of each half; most of them are never touched and take no memory."""

    @property
    def control(self) -> int:
        """Bytes before the first half, for the lines."""
        return -(-LINE * (TAKEN + self.ranks + self.ranks * MAIL) // PAGE) * PAGE

    @property
    def size(self) -> int:
        return self.control + 2 * self.half

    def header(self) -> bytes:
        return HEADER.pack(MAGIC, self.run, self.rank, self.ranks, self.half, os.geteuid())


class Segment:
    """A mapped segment: control for everybody to write, data for its owner only."""

    def __init__(self, fd: int, identity: Identity, *, own: bool) -> None:
        self.identity, self.fd = identity, fd
        self._maps = [mmap.mmap(fd, identity.control)]
        protection = mmap.PROT_READ | mmap.PROT_WRITE if own else mmap.PROT_READ
        size = 2 * identity.half
        self._maps.append(mmap.mmap(fd, size, prot=protection, offset=identity.control))
        self.control, self.data = (np.frombuffer(m, dtype=np.uint8).ctypes.data for m in self._maps)
        self._filled = [0, 0]

    def tensor(self) -> Tensor:
        """Both halves. torch would warn that a peer's cannot be written, which is meant."""
        whole = (ctypes.c_uint8 * (2 * self.identity.half)).from_address(self.data)
        vars(whole)["mapped"] = self._maps  # as long as there is a tensor, there is its memory
        return torch.frombuffer(whole, dtype=torch.uint8)

    @staticmethod
    def create(identity: Identity) -> Segment:
        fd = os.memfd_create("weft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, identity.size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.pwrite(fd, identity.header(), 0)
        segment = Segment(fd, identity, own=True)
        finalize(segment, os.close, fd)
        return segment

    @staticmethod
    def open(path: str, identity: Identity) -> Segment:
        """A peer's segment. What is not exactly what the peer said is refused before it is mapped."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        try:
            _check(fd, identity)
            return Segment(fd, identity, own=False)
        finally:
            os.close(fd)

    def fill(self, half: int, num_bytes: int) -> None:
        """Have memory behind the first bytes of a half: a lack of it is an error now, not a signal later."""
        if num_bytes <= self._filled[half]:
            return
        limit = self.identity.half
        try:
            if num_bytes > limit:
                raise OSError(f"a half has {limit} bytes")
            start = self.identity.control + half * limit + self._filled[half]
            os.posix_fallocate(self.fd, start, num_bytes - self._filled[half])
        except OSError as error:
            raise CommError(
                f"No shared memory for {num_bytes} bytes of messages: {error.strerror or error}.",
                hint="Use fewer ranks or shorter sequences, or transport='group' (WEFT_TRANSPORT=group).",
            ) from error
        self._filled[half] = num_bytes


def _check(fd: int, identity: Identity) -> None:
    about = os.fstat(fd)
    if about.st_uid != os.geteuid() or about.st_mode & 0o077:
        raise CommError(f"Rank {identity.rank}'s segment is not this user's alone.")
    if about.st_size != identity.size:
        raise CommError(f"Rank {identity.rank}'s segment has {about.st_size} bytes, not {identity.size}.")
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise CommError(f"Rank {identity.rank}'s segment may shrink.")
    if os.pread(fd, HEADER.size, 0) != identity.header():
        raise CommError(f"Rank {identity.rank}'s segment is of another run.")
