"""Ranks as threads of one process: the executor without processes, for tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import CommError
from weft.run.comm import Message


@dataclass
class _Board:
    """The messages between threads."""

    size: int
    timeout: float
    changed: threading.Condition = field(default_factory=threading.Condition)
    messages: dict[tuple[int, int, int, int], Tensor] = field(default_factory=dict)
    numbers: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def wait_until(self, ready: Callable[[], Any], what: str) -> None:
        with self.changed:
            if not self.changed.wait_for(ready, self.timeout):
                raise CommError(f"Waited {self.timeout:.0f} s for {what}.")


class ThreadComm:
    """The transport of one rank."""

    transport = "threads"

    def __init__(self, board: _Board, rank: int) -> None:
        self.board, self.rank, self.size, self.bytes_sent = board, rank, board.size, 0
        self._sent: dict[tuple[int, int], int] = {}
        self._received: dict[tuple[int, int], int] = {}
        self._gathered = 0

    def begin(self, device: torch.device) -> None:
        """Messages may lie anywhere."""

    def post(self, sends: list[Message], receives: list[Message], label: str, tag: int) -> _ThreadTransit:
        for peer, buffer in sends:
            self.bytes_sent += buffer.numel() * buffer.element_size()
            number = self._sent[peer, tag] = self._sent.get((peer, tag), 0) + 1
            with self.board.changed:
                # A copy, so that a sender that writes its buffer too early cannot go unnoticed elsewhere.
                self.board.messages[self.rank, peer, tag, number] = buffer.clone()
                self.board.changed.notify_all()
        keys: dict[int, tuple[tuple[int, int, int, int], Tensor]] = {}
        for peer, buffer in receives:
            number = self._received[peer, tag] = self._received.get((peer, tag), 0) + 1
            keys[peer] = ((peer, self.rank, tag, number), buffer)
        return _ThreadTransit(self.board, keys, label)

    def warm_up(self, device: torch.device) -> None:
        """Nothing has to be connected."""

    def collective(self, device: torch.device) -> bool:
        del device
        return False

    def all_to_all(self, sends: list[Message], receives: list[Message], label: str) -> _ThreadTransit:
        raise CommError(
            f"{label}: {len(sends)} sends, {len(receives)} receives: threads have no collectives."
        )

    def all_gather_ints(self, numbers: list[int]) -> list[list[int]]:
        self._gathered += 1
        keys = [(self._gathered, rank) for rank in range(self.size)]
        with self.board.changed:
            self.board.numbers[keys[self.rank]] = numbers
            self.board.changed.notify_all()
        self.board.wait_until(lambda: all(key in self.board.numbers for key in keys), "the other ranks")
        return [self.board.numbers[key] for key in keys]


class _ThreadTransit:
    def __init__(
        self, board: _Board, keys: dict[int, tuple[tuple[int, int, int, int], Tensor]], label: str
    ) -> None:
        self.board, self.keys, self.label = board, keys, label

    def wait_for(self, peer: int) -> None:
        key, buffer = self.keys.pop(peer)
        self.board.wait_until(lambda: key in self.board.messages, f"{self.label} from rank {peer}")
        message = self.board.messages.pop(key)
        if message.numel() != buffer.numel():
            raise CommError(
                f"{self.label}: rank {peer} sent {message.numel()} bytes, expected {buffer.numel()}."
            )
        buffer.copy_(message)

    def wait_sent(self, peer: int) -> None:
        """A message is a copy, so its sender may write again at once."""

    def finish(self) -> None:
        for peer in list(self.keys):
            self.wait_for(peer)


def run_threads(ranks: int, job: Callable[[ThreadComm], Any], *, timeout: float = 20.0) -> list[Any]:
    """Run `job(comm)` on every rank at once; the error of the rank that failed first is raised."""
    board = _Board(ranks, timeout)
    comms = [ThreadComm(board, rank) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(job, comm) for comm in comms]
    errors = [error for future in futures if (error := future.exception())]
    # A rank that timed out is a consequence; the one that did not send is the cause.
    errors.sort(key=lambda error: isinstance(error, CommError))
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
