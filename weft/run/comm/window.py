"""Window: memory of every rank that its peers read in place, and a few words from one rank to another.

What a transport needs to be one-sided. Each rank has two halves of memory to write; which of them a call
writes alternates, so that the peers may still read what the call before left in the other one.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

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

    def arrive(self, number: int) -> None:
        """This rank has reached a barrier; numbers grow by one."""
        ...

    def barrier(self, number: int, timeout: float) -> None:
        """Until all near peers have reached it; late raises Late."""
        ...


class Late(Exception):  # noqa: N818 - told on as a CommError by who knows what was waited for
    """Nothing came from `peer` in time."""

    def __init__(self, peer: int, reason: str) -> None:
        super().__init__(reason)
        self.peer = peer
