"""Check one-sided messages through symmetric memory (in a rehearsal, shared memory)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.doctor.suite import Check, CheckContext
from weft.run.comm import Lender, PendingExchange, shm, symmetric
from weft.run.comm.group import GroupComm
from weft.run.comm.onesided import ALIGN, OneSidedComm
from weft.run.groups import new_group
from weft.run.measure import links

TIMEOUT_SECONDS = 15.0
"""Below the suite's limit, so that the late rank is named."""
CALLS = 5
"""Enough to write both halves of the memory twice."""
NUMBERS = 1 << 18
RENDEZVOUS = "rendezvous"
NAMES = (RENDEZVOUS, "ring", "all-to-all", "growth", "two groups")


def checks(ctx: CheckContext) -> Iterator[Check]:
    world = dist.group.WORLD
    assert world is not None
    begun = [name for name in NAMES if name in ctx.finished]
    if begun == [RENDEZVOUS]:
        return  # an earlier process died in it
    is_first = ctx.begins(RENDEZVOUS)
    comm = _comm(ctx, world)
    if comm.size == 1 or comm.begin(ctx.device) is None or comm.reason:
        reason = comm.reason if comm.size > 1 else "there is one rank only"
        yield Check(name=RENDEZVOUS, status="skipped", note=reason)
        return
    comm.end()
    if is_first:
        yield Check(name=RENDEZVOUS, status="ok", note="shared memory stands in" if ctx.is_rehearsal else "")
    for name, exchange in zip(NAMES[1:], (_ring, _all_to_all, _growth, _two_groups), strict=True):
        if ctx.begins(name):
            yield ctx.judged(name, *exchange(ctx, comm), allowed=0.0)
    if not ctx.is_rehearsal and ctx.begins("bandwidth"):
        sizes, by_group = links.MessageSizes.of(ctx.device), GroupComm(world, TIMEOUT_SECONDS)
        by_group.warm_up(ctx.device)
        own, nccl = (
            links.measure_all_to_all(each, ctx.device, ctx.ranks, sizes) / 1e9 for each in (comm, by_group)
        )
        numbers = {"gbytes_per_s": own, "nccl_gbytes_per_s": nccl}
        yield Check(name="bandwidth", status="measured", note="each rank to all others", numbers=numbers)


def _comm(ctx: CheckContext, group: dist.ProcessGroup) -> OneSidedComm:
    rendezvous = shm.rendezvous if ctx.is_rehearsal else partial(symmetric.rendezvous, group)
    return OneSidedComm(GroupComm(group, TIMEOUT_SECONDS), rendezvous, TIMEOUT_SECONDS, group=group)


def _values(ctx: CheckContext, rank: int, call: int, count: int = NUMBERS) -> Tensor:
    """Return numbers that differ by rank, call and position."""
    numbers = torch.arange(count, device=ctx.device, dtype=torch.float32).remainder_(1009)
    return numbers.add_(1009 * (CALLS * rank + call))


def _begin(
    ctx: CheckContext, comm: OneSidedComm, counts: list[int], call: int
) -> tuple[Lender, list[Tensor]]:
    """Begin a call and return memory for messages of `counts` numbers; call 0 reserves it on all ranks."""
    lender = comm.begin(ctx.device)
    assert lender is not None
    if call == 0:
        lender.reserve(sum(4 * count + ALIGN for count in counts))
    lent = lender.lend({str(at): 4 * count for at, count in enumerate(counts)})
    return lender, list(lent.values())


def _empty(ctx: CheckContext, count: int) -> Tensor:
    return torch.empty(4 * count, dtype=torch.uint8, device=ctx.device)


def _received(transit: PendingExchange, peer: int) -> Tensor:
    message = transit.wait_for(peer)
    assert message is not None
    return message


def _ring(ctx: CheckContext, comm: OneSidedComm, count: int = NUMBERS) -> tuple[Tensor, Tensor]:
    """Pass the numbers of every rank around, as ring attention does, in several calls."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    actual: list[Tensor] = []
    expected: list[Tensor] = []
    for call in range(CALLS):
        lender, (message,) = _begin(ctx, comm, [count], call)
        message.view(torch.float32).copy_(_values(ctx, comm.rank, call, count))
        for hop in range(1, comm.size):
            transit = comm.post([(after, message)], [(before, _empty(ctx, count))], f"ring {hop}", 0)
            message = _received(transit, before)
            actual.append(message.view(torch.float32).clone())
            expected.append(_values(ctx, (comm.rank - hop) % comm.size, call, count))
        lender.end()
    return torch.cat(actual), torch.cat(expected)


def _all_to_all(ctx: CheckContext, comm: OneSidedComm) -> tuple[Tensor, Tensor]:
    """Send each rank numbers of its own, of different lengths, as ulysses does."""
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    counts = {peer: NUMBERS // comm.size + 64 * peer for peer in range(comm.size)}
    actual: list[Tensor] = []
    expected: list[Tensor] = []
    for call in range(CALLS):
        lender, lent = _begin(ctx, comm, [counts[peer] for peer in peers], call)
        for peer, message in zip(peers, lent, strict=True):
            message.view(torch.float32).copy_(_values(ctx, comm.rank, call, counts[peer]))
        receives = [(peer, _empty(ctx, counts[comm.rank])) for peer in peers]
        transit = comm.post(list(zip(peers, lent, strict=True)), receives, "all-to-all", 0)
        for peer in peers:
            actual.append(_received(transit, peer).view(torch.float32).clone())
            expected.append(_values(ctx, peer, call, counts[comm.rank]))
        lender.end()
    return torch.cat(actual), torch.cat(expected)


def _growth(ctx: CheckContext, comm: OneSidedComm) -> tuple[Tensor, Tensor]:
    """Send a message larger than all before it: the memory of all ranks must grow."""
    return _ring(ctx, comm, 4 * NUMBERS)


def _two_groups(ctx: CheckContext, comm: OneSidedComm) -> tuple[Tensor, Tensor]:
    """Alternate calls of all ranks and of groups of some, in the same memory."""
    groups = [dist.group.WORLD]
    if ctx.ranks >= 4:
        middle = ctx.ranks // 2
        groups = [new_group(list(half)) for half in (range(middle), range(middle, ctx.ranks))]
    own = next(group for group in groups if group is not None and group.rank() >= 0)
    half = _comm(ctx, own)
    actual, expected = zip(*[_ring(ctx, each) for each in (half, comm, half, comm)], strict=True)
    return torch.cat(actual), torch.cat(expected)
