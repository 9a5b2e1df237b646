"""Transports behind one small interface: post what leaves and what comes, wait for it later."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

Message = tuple[int, Tensor]
"""(peer, flat buffer)."""


class Transit(Protocol):
    """Messages under way. A receive is waited for where its data is used, sends at the end."""

    def wait_for(self, peer: int) -> None:
        """Until the message from `peer` is in its buffer."""
        ...

    def finish(self) -> None:
        """Until every buffer of this transit may be written again."""
        ...


class Comm(Protocol):
    """Point-to-point messages between the ranks of one group."""

    rank: int
    size: int
    bytes_sent: int
    """Payload handed to the transport so far."""

    def post(self, sends: list[Message], receives: list[Message], label: str, tag: int) -> Transit:
        """Start all of them and return at once; the n-th post of a pair and tag meets its peer's n-th.

        The tag stands for the plan, so that messages of different plans never meet.
        """
        ...

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        """Everyone's equally many integers, by rank; for agreement, not for data."""
        ...
