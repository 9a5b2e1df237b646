"""Transports behind one small interface: post sends and receives, and wait for each where it is needed."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

Message = tuple[int, Tensor]
"""(peer, flat buffer)."""
LATE_HINT = "That rank is lost, stuck or late; look at its own error first."


class PendingExchange(Protocol):
    """Messages under way: wait for a receive before using it, for a send before writing its buffer."""

    def wait_for(self, peer: int) -> Tensor | None:
        """Wait for the message from `peer`; return the tensor it is in, if that is not its buffer."""
        ...

    def wait_sent(self, peer: int) -> None:
        """Wait until the buffer of the message to `peer` may be written again."""
        ...

    def finish(self) -> None:
        """Wait for all messages."""
        ...


class Borrower(Protocol):
    """An object with views of lent memory."""

    def unbind(self) -> None:
        """Drop all views."""
        ...


class Lender(Protocol):
    """Memory for the messages of one call that peers read."""

    near: frozenset[int]
    """Peers that share memory: they read messages here, and theirs stay in their own memory."""
    lands: bool
    """Whether received messages are copied to a buffer; else they are read in place and need none."""

    def reserve(self, num_bytes: int) -> None:
        """Make room for a kind of call before its first `lend`; all ranks call it together."""
        ...

    def lend(self, sizes: dict[str, int], borrower: Borrower | None = None) -> dict[str, Tensor]:
        """Return a buffer of each size, the same ones for the same sizes until the borrower is unbound."""
        ...

    def end(self) -> None:
        """End the call: this rank reads no more messages of its peers."""
        ...


class Comm(Protocol):
    """Point-to-point messages between the ranks of one group."""

    transport: str
    """Its name; ranks compare it, since different transports would wait for each other."""
    rank: int
    size: int
    bytes_sent: int
    """Payload handed to the transport so far."""

    def begin(self, device: torch.device) -> Lender | None:
        """Begin a call, on all ranks; return the lender where messages must lie in its memory."""
        ...

    def post(self, sends: list[Message], receives: list[Message], label: str, tag: int) -> PendingExchange:
        """Start all messages and return at once; the n-th post of a pair and tag matches the peer's n-th.

        The tag stands for the plan, so that messages of different plans never match.
        """
        ...

    def warm_up(self, device: torch.device) -> None:
        """Connect all ranks for tensors of a device, once; all ranks call it together.

        NCCL creates its communicator in the first operation of a group, in which every member must take part.
        """
        ...

    def collective(self, device: torch.device) -> bool:
        """Whether `all_to_all` serves tensors of a device; the same on all ranks."""
        ...

    def all_to_all(self, sends: list[Message], receives: list[Message], label: str) -> PendingExchange:
        """Start one collective of all ranks. Buffers are adjacent, in the order of ranks, at each end."""
        ...

    def all_gather_ints(self, numbers: list[int]) -> list[list[int]]:
        """Return the equally many integers of each rank, by rank; for agreement, not for data."""
        ...


def reason_of(error: Exception) -> str:
    """Return the first line of an error's message, without the source location before it."""
    return str(error).splitlines()[0].split("] ")[-1].strip() if str(error) else type(error).__name__
