"""Transports behind one small interface: post what leaves and what comes, wait for it later."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

Message = tuple[int, Tensor]
"""(peer, flat buffer)."""


class Transit(Protocol):
    """Messages under way. A receive is waited for where its data is used, a send where its buffer is."""

    def wait_for(self, peer: int) -> Tensor | None:
        """Until the message from `peer` is here: in its buffer, or in the tensor that is returned."""
        ...

    def wait_sent(self, peer: int) -> None:
        """Until the buffer of the message to `peer` may be written again."""
        ...

    def finish(self) -> None:
        """Until every buffer of this transit may be written again."""
        ...


class Borrower(Protocol):
    """Who views memory that was lent."""

    def unbind(self) -> None:
        """Drop every view of it."""
        ...


class Lender(Protocol):
    """Memory for the messages of one call that peers read."""

    near: frozenset[int]
    """Peers that read this rank's messages from here, and whose messages stay in their own memory."""
    lands: bool
    """Whether received messages are copied to a buffer; else none is needed, they are read in place."""

    def reserve(self, num_bytes: int) -> None:
        """Make room for a call, once for each kind of call, before it lends; all ranks call it together."""
        ...

    def lend(self, sizes: dict[str, int], borrower: Borrower | None = None) -> dict[str, Tensor]:
        """A buffer of each size, the same ones for the same sizes until the borrower is unbound."""
        ...

    def end(self) -> None:
        """The call is over: this rank reads nothing of its peers any more."""
        ...


class Comm(Protocol):
    """Point-to-point messages between the ranks of one group."""

    transport: str
    """Its name: ranks that have chosen differently would wait for each other."""
    rank: int
    size: int
    bytes_sent: int
    """Payload handed to the transport so far."""

    def begin(self, device: torch.device) -> Lender | None:
        """A call begins, on all ranks; where messages have to lie in certain memory, who lends it."""
        ...

    def post(self, sends: list[Message], receives: list[Message], label: str, tag: int) -> Transit:
        """Start all of them and return at once; the n-th post of a pair and tag meets its peer's n-th.

        The tag stands for the plan, so that messages of different plans never meet.
        """
        ...

    def warm_up(self, device: torch.device) -> None:
        """Connect all ranks for tensors of a device, once; all ranks call it together.

        NCCL makes its communicator in the first operation of a group, in which every member must take part.
        """
        ...

    def collective(self, device: torch.device) -> bool:
        """Whether `all_to_all` serves tensors of a device; the same on all ranks."""
        ...

    def all_to_all(self, sends: list[Message], receives: list[Message], label: str) -> Transit:
        """Start one collective of all ranks. Buffers lie side by side, in the order of ranks, at each end."""
        ...

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Everyone's equally many integers, by rank; for agreement, not for data."""
        ...
