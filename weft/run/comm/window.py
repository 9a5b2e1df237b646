"""Window: memory of every rank that its peers read, and a few words from one rank to another.

What a transport needs to be one-sided. Each rank has two halves of memory to write; which of them a call
writes alternates, so that the peers may still read what the call before left in the other one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from weft.run.streams import Event

HALVES = 2


class Words(NamedTuple):
    """What a rank tells a peer: where a message of some plan lies."""

    tag: int
    owner: int
    """Whose memory it lies in: the rank that wrote it, not the one that passes it on."""
    offset: int
    num_bytes: int


class Window(Protocol):
    """One rank's view of the memory of some ranks of a group, in the group's ranks."""

    rank: int
    near: frozenset[int]
    """The peers whose memory this one reads."""
    device_type: str
    lands: bool = False
    """Whether messages are copied out, once, by `land`; else they are read in place."""

    def reserve(self, num_bytes: int, timeout: float) -> bool:
        """Make every half of every rank large enough, all ranks together; whether memory has moved."""
        del num_bytes, timeout
        return False

    def allocate(self, half: int, num_bytes: int) -> Tensor:
        """At least so many bytes of this rank's own half; what was given before stays where it is."""
        ...

    def get(self, owner: int, offset: int, num_bytes: int) -> Tensor:
        """Bytes in some rank's memory, in place. Out of bounds raises."""
        ...

    def place(self, x: Tensor) -> tuple[int, int] | None:
        """(owner, offset) of a tensor that lies in this window."""
        ...

    def put(self, peer: int, words: Words, timeout: float) -> None:
        """Tell a peer, after all that was written before."""
        ...

    def wait(self, peer: int, timeout: float) -> Words:
        """The next words from a peer, in the order in which it put them; late raises Late."""
        ...

    def land(self, message: Tensor, into: Tensor, ready: Event) -> Event:
        """Start to copy a message whose words have come, behind `ready`; return the event of its end."""
        raise AssertionError(f"{message.shape} is read in place, not copied to {into.shape} behind {ready}")

    def turn(self, call: int, halves: int, timeout: float) -> int:
        """The half that a call writes, once no peer reads it any more; late raises Late."""
        ...

    def arrive(self, call: int) -> None:
        """This rank has read all messages of a call; calls grow by one."""
        ...

    def release(self) -> None:
        """After a failure: end whatever still waits for peers on this device."""

    def close(self) -> None:
        """Give the memory back."""


class Late(Exception):  # noqa: N818 - told on as a CommError by who knows what was waited for
    """Nothing came from `peer` in time."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer
