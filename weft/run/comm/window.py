"""Window: memory of every rank that its peers read, and descriptors sent from one rank to another.

This is what a one-sided transport needs. Each rank writes to two halves of its memory in turn, so that peers
may still read what the call before left in the other half.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from weft.run.streams import Event

HALVES = 2


class Descriptor(NamedTuple):
    """Where a message of some plan lies."""

    tag: int
    owner: int
    """The rank in whose memory it lies: its writer, not a rank that passes it on."""
    offset: int
    num_bytes: int


class Window(Protocol):
    """One rank's view of the memory of some ranks of a group, in group ranks."""

    rank: int
    near: frozenset[int]
    """The peers whose memory this rank reads."""
    device_type: str
    lands: bool = False
    """Whether messages are copied out, once, by `land`; else they are read in place."""

    def reserve(self, num_bytes: int, timeout: float) -> bool:
        """Grow the halves of all ranks, all ranks together; return whether memory has moved."""
        del num_bytes, timeout
        return False

    def allocate(self, half: int, num_bytes: int) -> Tensor:
        """Return at least so many bytes of this rank's half; earlier allocations stay valid."""
        ...

    def get(self, owner: int, offset: int, num_bytes: int) -> Tensor:
        """Return a view of a rank's memory; out of bounds raises."""
        ...

    def place(self, x: Tensor) -> tuple[int, int] | None:
        """Return (owner, offset) of a tensor that lies in this window."""
        ...

    def put(self, peer: int, descriptor: Descriptor, timeout: float) -> None:
        """Send a descriptor to a peer, after all earlier writes."""
        ...

    def wait(self, peer: int, timeout: float) -> Descriptor:
        """Return the next descriptor from a peer, in the order of its puts; raise LatePeerError."""
        ...

    def land(self, message: Tensor, into: Tensor, ready: Event) -> Event:
        """Start to copy a message whose descriptor has arrived, behind `ready`; return its end."""
        raise AssertionError(f"{message.shape} is read in place, not copied to {into.shape} behind {ready}")

    def turn(self, call: int, timeout: float) -> int:
        """Return the half that a call writes, once no peer reads it; raise LatePeerError."""
        ...

    def arrive(self, call: int) -> None:
        """Signal that this rank has read all messages of a call; calls are numbered upwards."""
        ...

    def release(self) -> None:
        """End all waits for peers on this device, after a failure."""

    def close(self) -> None:
        """Free the memory."""


class LatePeerError(Exception):
    """Nothing came from `peer` in time; the caller turns it into a CommError that names the operation."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer
