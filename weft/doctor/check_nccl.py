"""Check NCCL, or gloo in a rehearsal on CPUs: exchange tensors in a group of all ranks, and in two halves.

Results must be exact: they are integers, computed in float64.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from weft.doctor.suite import Check, CheckContext
from weft.run.comm.group import GroupComm
from weft.run.groups import new_group

NUMBERS = 1 << 20
"""Elements of each message, 8 MB: quick to send, but more than one packet on any link."""
TIMEOUT_SECONDS = 30.0
"""Below the time limit of the suite, so that the communicator's `Watcher` names the late rank before that."""


def checks(ctx: CheckContext) -> Iterator[Check]:
    """Yield one check for each kind of exchange; every rank runs all of them, in this order."""
    world = dist.group.WORLD
    assert world is not None
    comm = GroupComm(world, TIMEOUT_SECONDS)
    if ctx.begins("all ranks meet"):
        began = time.perf_counter()
        comm.warm_up(ctx.device)
        rows = comm.all_gather_ints([ctx.rank, ctx.ranks])
        expected = [[rank, ctx.ranks] for rank in range(ctx.ranks)]
        seconds = time.perf_counter() - began
        actual = torch.tensor(rows)
        yield ctx.judged("all ranks meet", actual, torch.tensor(expected), allowed=0.0, seconds=seconds)
    if ctx.begins("all_reduce"):
        values = _values(ctx, ctx.rank)
        dist.all_reduce(values)
        expected = sum((_values(ctx, rank) for rank in range(1, ctx.ranks)), _values(ctx, 0))
        yield ctx.judged("all_reduce", values, expected, allowed=0.0)
    if ctx.begins("ring of messages"):
        yield ctx.judged("ring of messages", *_ring(ctx, comm), allowed=0.0)
    if ctx.begins("all_to_all"):
        yield ctx.judged("all_to_all", *_all_to_all(ctx, comm), allowed=0.0)
    yield from _halves(ctx)


def _values(ctx: CheckContext, rank: int, count: int = NUMBERS) -> Tensor:
    """Return integers that differ by rank and position, exact in float64 for any number of ranks."""
    return torch.arange(count, device=ctx.device, dtype=torch.float64).remainder_(1009).add_(1009 * rank)


def _ring(ctx: CheckContext, comm: GroupComm) -> tuple[Tensor, Tensor]:
    """Send to the next rank and receive from the one before, as ring attention does."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    received = torch.zeros(NUMBERS, device=ctx.device, dtype=torch.float64)
    if comm.size == 1:
        return received, received
    comm.post([(after, _values(ctx, comm.rank))], [(before, received)], "ring", 1).finish()
    return received, _values(ctx, before)


def _all_to_all(ctx: CheckContext, comm: GroupComm) -> tuple[Tensor, Tensor]:
    """Send each rank a message of its own length, as ulysses does."""
    lengths = [1000 + 10 * rank for rank in range(comm.size)]
    sends = torch.cat([_values(ctx, comm.rank, length) for length in lengths])
    expected = torch.cat([_values(ctx, rank, lengths[comm.rank]) for rank in range(comm.size)])
    receives = torch.zeros_like(expected)
    outgoing = list(enumerate(sends.split(lengths)))
    incoming = list(enumerate(receives.split(lengths[comm.rank])))
    if comm.size == 1:
        return sends, expected
    comm.all_to_all(outgoing, incoming, "all_to_all").finish()
    return receives, expected


def _halves(ctx: CheckContext) -> Iterator[Check]:
    """Run a collective in both halves of the ranks at once: neither group may wait for the other."""
    if not ctx.begins("halves"):
        return
    if ctx.ranks < 2:
        yield Check(name="halves", status="skipped", note="there is one rank only")
        return
    middle = ctx.ranks // 2
    halves = [range(middle), range(middle, ctx.ranks)]
    groups = [new_group(list(half)) for half in halves]
    own = int(ctx.rank >= middle)
    group = groups[own]
    assert group is not None
    GroupComm(group, TIMEOUT_SECONDS).warm_up(ctx.device)
    values = _values(ctx, ctx.rank)
    dist.all_reduce(values, group=group)
    expected = sum((_values(ctx, rank) for rank in halves[own][1:]), _values(ctx, halves[own][0]))
    yield ctx.judged("halves", values, expected, allowed=0.0)
