"""weft's own process-group transport over the adversary in the place of NCCL, with threads as ranks.

Works behave as NCCL's: `wait()` without a time-out is a wait of the stream, which here blocks the thread as
the stream would block the kernels behind it; with a time-out it would block the host, which is counted.
Aborting a communicator ends all waits, and leaves garbage (0xFF) where messages should be.

run_nccl(4, lambda comm: Executor(schedule, comm, kernel).forward(…), timeout=60.0)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from tests.adversary import POISON, Group, Work
from weft.run.comm import group as group_module
from weft.run.comm.group import GroupComm
from weft.run.comm.watcher import Watcher


class Member:
    """A process group as one rank sees it."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self._rank = world, rank
        self.posts = 0
        self.aborted = False

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self.world.group.size

    def _get_backend(self, device: torch.device) -> Member:
        del device
        return self

    def abort(self) -> None:
        self.aborted = True


class World:
    """One process group: what its ranks share, and what they must not do."""

    def __init__(self, size: int, is_stuck: bool = False) -> None:
        self.group, self.is_stuck = Group(size, collective=True), is_stuck
        self.store = dist.HashStore()
        self.members = [Member(self, rank) for rank in range(size)]
        self.host_waits = 0
        self.names = list(range(size))
        """Of its ranks, in the world."""


class NcclWork:
    """What NCCL returns for a batch or a collective."""

    def __init__(self, member: Member, work: Work) -> None:
        self.member, self.work = member, work

    def wait(self, timeout: Any = None) -> None:
        world = self.member.world
        world.host_waits += timeout is not None
        tried = -1
        # No lock is taken while nothing changes: a thread that is interrupted with one may keep it.
        while not (self.member.aborted or self.work.is_done):
            posts = sum(member.posts for member in world.members)
            if posts == tried or world.is_stuck:
                time.sleep(0.005)
            else:
                tried = posts
                self.is_completed()

    def is_completed(self) -> bool:
        world = self.member.world
        with world.group.changed:
            return not world.is_stuck and world.group.complete(self.work)


class P2POp(NamedTuple):
    op: Any
    tensor: Tensor
    group: Member
    group_peer: int


def _start(member: Member, label: str, sends: dict[int, Tensor], receives: dict[int, Tensor]) -> NcclWork:
    for buffer in receives.values():
        buffer.view(torch.uint8).fill_(POISON)
    work = Work(member.rank(), label, label != "batch", sends, receives)
    member.world.group.post(work)
    member.posts += 1
    return NcclWork(member, work)


def batch_isend_irecv(calls: list[P2POp]) -> list[NcclWork]:
    member = calls[0].group
    ways = ({c.group_peer: c.tensor for c in calls if c.op == op} for op in ("isend", "irecv"))
    return [_start(member, "batch", *ways)]


def all_to_all_single(
    into: Tensor, x: Tensor, out_splits: list[int], in_splits: list[int], *, group: Member, async_op: bool
) -> NcclWork:
    assert async_op
    parts = (dict(enumerate(t.split(n))) for t, n in ((x, in_splits), (into, out_splits)))
    return _start(group, "all_to_all", *({r: p for r, p in part.items() if p.numel()} for part in parts))


def all_gather(into: list[Tensor], x: Tensor, *, group: Member, async_op: bool) -> NcclWork:
    assert async_op
    return _start(group, "all_gather", dict.fromkeys(range(group.size()), x), dict(enumerate(into)))


def all_reduce(x: Tensor, *, group: Member, async_op: bool) -> NcclWork:
    into = [torch.empty_like(x) for _ in range(group.size())]
    return all_gather(into, x, group=group, async_op=async_op)


class _Stores:
    def __getitem__(self, member: Member) -> tuple[str, Any]:
        return "nccl", member.world.store


@contextmanager
def fake_nccl(*, threads: bool) -> Iterator[None]:
    """GroupComm on this stand-in. `threads`: watchers run by themselves; else somebody ticks them."""
    fake = SimpleNamespace(
        P2POp=P2POp,
        isend="isend",
        irecv="irecv",
        batch_isend_irecv=batch_isend_irecv,
        all_to_all_single=all_to_all_single,
        all_gather=all_gather,
        all_reduce=all_reduce,
        PrefixStore=dist.PrefixStore,
        get_process_group_ranks=lambda member: member.world.names,
        distributed_c10d=SimpleNamespace(_world=SimpleNamespace(pg_map=_Stores())),
    )
    run = nullcontext() if threads else patch.object(Watcher, "start", _only_note)
    with (
        patch.object(group_module, "dist", fake),
        patch.object(group_module, "host_device", lambda _: torch.device("cpu")),
        patch.object(GroupComm, "is_on_stream", lambda *_: True),
        run,
    ):
        yield


def _only_note(watcher: Watcher, timeout: float) -> None:
    watcher.timeout = min(watcher.timeout, timeout)


class Run:
    """Jobs on all ranks of a world, under way."""

    def __init__(self, world: World, timeout: float) -> None:
        self.world, self.timeout = world, timeout
        self.comms = [GroupComm(member, timeout) for member in world.members]  # pyright: ignore
        self.watchers = [comm.watcher for comm in self.comms]
        self.futures: list[Future[Any]] = []
        self.now = 0.0

    def tick(self, *, without: frozenset[int] = frozenset(), step: float) -> None:
        """Let the watchers look once, `step` seconds later; those of lost ranks are gone."""
        self.now += step
        for rank, watcher in enumerate(self.watchers):
            if rank not in without and watcher.failure is None:
                watcher.tick(self.now)

    def errors(self) -> list[BaseException | None]:
        return [future.exception(60.0) for future in self.futures]


@contextmanager
def nccl_ranks(
    ranks: int,
    job: Callable[[GroupComm], Any],
    *,
    timeout: float = 60.0,
    threads: bool = False,
    is_stuck: bool = False,
) -> Iterator[Run]:
    """Run `job(comm)` on every rank; when the block ends, communicators are aborted, so that no thread stays.

    is_stuck   no work ever ends, although all ranks take part.
    """
    world = World(ranks, is_stuck)
    with fake_nccl(threads=threads):
        run = Run(world, timeout)
        with ThreadPoolExecutor(ranks) as pool:
            run.futures = [pool.submit(job, comm) for comm in run.comms]
            try:
                yield run
            finally:
                for member in world.members:
                    member.abort()
        for watcher in run.watchers:
            watcher.close()


def run_nccl(ranks: int, job: Callable[[GroupComm], Any]) -> tuple[list[Any], World]:
    """Run `job(comm)` on every rank to its end."""
    with nccl_ranks(ranks, job) as run:
        return [future.result(60.0) for future in run.futures], run.world


def until(claim: Callable[[], bool]) -> None:
    """Wait for what other threads do; a test that waits in vain fails."""
    deadline = time.monotonic() + 60.0
    while not claim():
        assert time.monotonic() < deadline, "waited in vain"
        threading.Event().wait(0.005)
