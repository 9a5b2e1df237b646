"""A transport that behaves as NCCL may at its worst, with threads as ranks.

- Buffers to receive into hold NaN (0xFF) from their post on.
- A post is one work, a kernel: waiting for any of its messages waits for all of them.
- Works of a rank run one after another, and messages of two ranks meet in the order of their posts: tags mean
  nothing.
- Bytes move at the last moment: when an end first waits for their work, or for a later one.
- Ranks that `warm_up` has not connected are connected by their first exchange, in which all must take part.

run_adversary(4, lambda comm: Executor(schedule, comm, kernel).forward(…))
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from weft.core.errors import CommError
from weft.run.comm import Message

POISON = 0xFF
TIMEOUT = 60.0
"""Seconds that a rank waits for others, at most: only a deadlock takes them."""


@dataclass(eq=False)
class Work:
    """All messages of one post of one rank."""

    rank: int
    label: str
    collective: bool
    sends: dict[int, Tensor]
    receives: dict[int, Tensor]
    sequence: dict[tuple[str, int], int] = field(default_factory=dict)
    """The how many-th message to, or from, each peer it is."""
    moved: set[int] = field(default_factory=set)
    """Peers whose message has arrived."""
    is_done: bool = False


class Group:
    """What the ranks share: works by rank in the order of their posts, under one lock."""

    def __init__(self, size: int, *, collective: bool) -> None:
        self.size, self.collective = size, collective
        self.changed = threading.Condition()
        self.works: list[list[Work]] = [[] for _ in range(size)]
        self.ends: dict[tuple[str, int, int, int], Work] = {}
        """Works by the messages that they have: ("send" or "receive", rank, peer, sequence number)."""
        self.first: dict[int, tuple[int, str]] = {}
        """The first exchange of each rank, as (tag, label)."""
        self.warm: set[int] = set()
        self.left: set[int] = set()
        """Ranks whose job has ended."""
        self.errors: list[BaseException] = []
        """Of the ranks, in the order in which they failed."""
        self.visited: set[Work] = set()
        self.numbers: defaultdict[int, dict[int, list[int]]] = defaultdict(dict)

    @contextmanager
    def until(self, ready: Callable[[], bool], what: str) -> Iterator[None]:
        """Hold the lock once `ready`, which is asked again after every change."""
        with self.changed:
            self.changed.wait_for(lambda: ready() or bool(self.errors), TIMEOUT)
            if not ready():
                raise CommError(f"Waited in vain for {what}.")
            yield
            self.changed.notify_all()

    def connect(self, rank: int, exchange: tuple[int, str]) -> None:
        """The first exchange of a rank waits for all others to make the same one their first."""
        if len(self.warm) == self.size:
            return
        with self.changed:
            self.first.setdefault(rank, exchange)
            self.changed.notify_all()
        absent: set[int] = set()

        def is_settled() -> bool:
            absent.update(peer for peer in self.left if peer not in self.first)
            absent.update(peer for peer, first in self.first.items() if first != self.first[rank])
            return bool(absent) or len(self.first) == self.size

        with self.until(is_settled, "all ranks to connect"):
            if absent:
                raise CommError(
                    f"{exchange[1]} is the first exchange of the group, and ranks {sorted(absent)} take no "
                    "part in it: without a warm-up NCCL hangs."
                )

    def post(self, work: Work) -> None:
        with self.changed:
            for way, messages in (("send", work.sends), ("receive", work.receives)):
                for peer in messages:
                    earlier = [
                        one.sequence[way, peer]
                        for one in self.works[work.rank]
                        if (way, peer) in one.sequence
                    ]
                    number = work.sequence[way, peer] = len(earlier)
                    self.ends[way, work.rank, peer, number] = work
            self.works[work.rank].append(work)
            self.changed.notify_all()

    def complete(self, work: Work) -> bool:
        """Move all messages of a work, after earlier works of its rank; False if a peer is not that far."""
        if work.is_done or work in self.visited:  # ranks that wait for each other do so for good
            return work.is_done
        self.visited.add(work)
        try:
            work.is_done = self.run(work)
        finally:
            self.visited.remove(work)
        return work.is_done

    def run(self, work: Work) -> bool:
        if not self.starts(work):
            return False
        others = [self.ends.get((way, peer, work.rank, number)) for way, peer, number in self.wanted(work)]
        if not all(other is not None and self.starts(other) for other in others):
            return False
        for (way, peer, _), other in zip(self.wanted(work), others, strict=True):
            assert other is not None
            self.move(*((other, work, peer) if way == "send" else (work, other, work.rank)))
        return True

    def wanted(self, work: Work) -> list[tuple[str, int, int]]:
        """The other ends of the messages of a work."""
        other = {"send": "receive", "receive": "send"}
        return [(other[way], peer, number) for (way, peer), number in work.sequence.items()]

    def starts(self, work: Work) -> bool:
        works = self.works[work.rank]
        return all(self.complete(earlier) for earlier in works[: works.index(work)])

    def move(self, sender: Work, receiver: Work, source: int) -> None:
        if source in receiver.moved:
            return
        receiver.moved.add(source)
        data, into = sender.sends[receiver.rank], receiver.receives[source]
        if data.numel() != into.numel() or sender.collective != receiver.collective:
            raise CommError(
                f"{receiver.label} of rank {receiver.rank} expects {into.numel()} bytes and meets "
                f"{sender.label} of rank {source} with {data.numel()}."
            )
        into.copy_(data.clone())


class AdversaryComm:
    """One rank's end of the group."""

    transport = "adversary"

    def __init__(self, group: Group, rank: int) -> None:
        self.group, self.rank, self.size, self.bytes_sent = group, rank, group.size, 0
        self._gathered = 0

    def begin(self, device: torch.device) -> None:
        """Messages may lie anywhere."""

    def warm_up(self, device: torch.device) -> None:
        del device
        with self.group.changed:
            self.group.warm.add(self.rank)
            self.group.changed.notify_all()
        with self.group.until(lambda: len(self.group.warm) == self.size, "all ranks to warm up"):
            pass

    def post(self, sends: list[Message], receives: list[Message], label: str, tag: int) -> AdversaryTransit:
        self.group.connect(self.rank, (tag, label))
        return self._start(Work(self.rank, label, False, dict(sends), dict(receives)))

    def collective(self, device: torch.device) -> bool:
        del device
        return self.group.collective and self.size > 1

    def all_to_all(self, sends: list[Message], receives: list[Message], label: str) -> AdversaryTransit:
        self.group.connect(self.rank, (-1, label))
        for messages in (sends, receives):
            for (peer, buffer), (after, beside) in zip(messages, messages[1:], strict=False):
                if after <= peer or beside.data_ptr() != buffer.data_ptr() + buffer.numel():
                    raise CommError(f"{label}: the buffers of rank {self.rank} are not side by side by rank.")
        return self._start(Work(self.rank, label, True, dict(sends), dict(receives)))

    def _start(self, work: Work) -> AdversaryTransit:
        self.bytes_sent += sum(buffer.numel() for peer, buffer in work.sends.items() if peer != self.rank)
        for buffer in work.receives.values():
            buffer.fill_(POISON)
        self.group.post(work)
        return AdversaryTransit(self.group, work)

    def all_gather_ints(self, numbers: list[int]) -> list[list[int]]:
        self._gathered += 1
        with self.group.changed:
            gathered = self.group.numbers[self._gathered]
            gathered[self.rank] = numbers
            self.group.changed.notify_all()
        with self.group.until(lambda: len(gathered) == self.size, "the numbers of all ranks"):
            return [gathered[rank] for rank in range(self.size)]


class AdversaryTransit:
    """Waits for one message are waits for the work of all of them."""

    def __init__(self, group: Group, work: Work) -> None:
        self.group, self.work = group, work

    def finish(self) -> None:
        work = self.work
        with self.group.until(lambda: self.group.complete(work), f"{work.label} on rank {work.rank}"):
            pass

    def wait_for(self, peer: int) -> None:
        if peer not in self.work.receives:
            raise CommError(f"{self.work.label} brings nothing from rank {peer} to rank {self.work.rank}.")
        self.finish()

    def wait_sent(self, peer: int) -> None:
        if peer not in self.work.sends:
            raise CommError(f"{self.work.label} brings nothing from rank {self.work.rank} to rank {peer}.")
        self.finish()


def run_adversary(
    ranks: int, job: Callable[[AdversaryComm], Any], *, collective: bool = False, warm_up: bool = True
) -> list[Any]:
    """Run `job(comm)` on every rank at once; the error of the rank that failed first is raised."""
    group = Group(ranks, collective=collective)

    def run(rank: int) -> Any:
        comm = AdversaryComm(group, rank)
        try:
            if warm_up:
                comm.warm_up(torch.device("cpu"))
            return job(comm)
        except BaseException as error:
            with group.changed:
                group.errors.append(error)
            raise
        finally:
            with group.changed:
                group.left.add(rank)
                group.changed.notify_all()

    with ThreadPoolExecutor(ranks) as pool:
        futures = [pool.submit(run, rank) for rank in range(ranks)]
    if group.errors:
        raise group.errors[0]
    return [future.result() for future in futures]
