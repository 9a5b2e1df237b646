"""Symmetric memory (in a rehearsal shared memory): one-sided messages, judged by what was sent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from weft.doctor.part import Check, Site
from weft.run import links
from weft.run.comm import Lender, shm, symmetric
from weft.run.comm.group import GroupComm
from weft.run.comm.onesided import ALIGN, OneSidedComm
from weft.run.groups import new_group

TIMEOUT_SECONDS = 15.0
"""Before the limit of the part, so that the rank that is late is named."""
CALLS = 5
"""Enough that both halves of the memory are written again."""
NUMBERS = 1 << 18
RENDEZVOUS = "rendezvous"
NAMES = (RENDEZVOUS, "ring", "all-to-all", "growth", "two groups")


def checks(site: Site) -> Iterator[Check]:
    world = dist.group.WORLD
    assert world is not None
    begun = [name for name in NAMES if name in site.finished]
    if begun == [RENDEZVOUS]:
        return  # an earlier process died in it
    is_first = site.begins(RENDEZVOUS)
    comm = _comm(site, world)
    if comm.size == 1 or comm.begin(site.device) is None or comm.reason:
        reason = comm.reason if comm.size > 1 else "there is one rank only"
        yield Check(name=RENDEZVOUS, status="skipped", note=reason)
        return
    comm.end()
    if is_first:
        yield Check(name=RENDEZVOUS, status="ok", note="shared memory stands in" if site.is_rehearsal else "")
    for name, exchange in (("ring", _ring), ("all-to-all", _all_to_all), ("growth", _growth)):
        if site.begins(name):
            yield site.judged(name, *exchange(site, comm), allowed=0.0)
    if site.begins("two groups"):
        yield site.judged("two groups", *_two_groups(site, comm), allowed=0.0)
    if not site.is_rehearsal and site.begins("bandwidth"):
        sizes, by_group = links.Sizes.of(site.device), GroupComm(world, TIMEOUT_SECONDS)
        by_group.warm_up(site.device)
        own, nccl = (
            links.measure_all_to_all(each, site.device, site.ranks, sizes) / 1e9 for each in (comm, by_group)
        )
        numbers = {"gbytes_per_s": own, "nccl_gbytes_per_s": nccl}
        yield Check(name="bandwidth", status="measured", note="each rank to all others", numbers=numbers)


def _comm(site: Site, group: dist.ProcessGroup) -> OneSidedComm:
    meet = shm.meet if site.is_rehearsal else partial(symmetric.meet, group)
    return OneSidedComm(GroupComm(group, TIMEOUT_SECONDS), meet, TIMEOUT_SECONDS, group=group)


def _values(site: Site, rank: int, call: int, count: int = NUMBERS) -> Tensor:
    """Numbers that tell ranks, calls and places apart."""
    numbers = torch.arange(count, device=site.device, dtype=torch.float32).remainder_(1009)
    return numbers.add_(1009 * (CALLS * rank + call))


def _begin(site: Site, comm: OneSidedComm, counts: list[int], call: int) -> tuple[Lender, list[Tensor]]:
    """Begin a call, and return memory for messages of so many numbers; all ranks make room in call 0."""
    lender = comm.begin(site.device)
    assert lender is not None
    if call == 0:
        lender.reserve(sum(4 * count + ALIGN for count in counts))
    lent = lender.lend({str(at): 4 * count for at, count in enumerate(counts)})
    return lender, list(lent.values())


def _empty(site: Site, count: int) -> Tensor:
    return torch.empty(4 * count, dtype=torch.uint8, device=site.device)


def _ring(site: Site, comm: OneSidedComm, count: int = NUMBERS) -> tuple[Tensor, Tensor]:
    """Pass the numbers of every rank around, as ring attention does, in several calls."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for call in range(CALLS):
        lender, (message,) = _begin(site, comm, [count], call)
        message.view(torch.float32).copy_(_values(site, comm.rank, call, count))
        for hop in range(1, comm.size):
            transit = comm.post([(after, message)], [(before, _empty(site, count))], f"ring {hop}", 0)
            came = transit.wait_for(before)
            assert came is not None
            message = came
            found.append(came.view(torch.float32).clone())
            expected.append(_values(site, (comm.rank - hop) % comm.size, call, count))
        lender.end()
    return torch.cat(found), torch.cat(expected)


def _all_to_all(site: Site, comm: OneSidedComm) -> tuple[Tensor, Tensor]:
    """Send each rank numbers of its own, of different lengths, as ulysses does."""
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    counts = {peer: NUMBERS // comm.size + 64 * peer for peer in range(comm.size)}
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for call in range(CALLS):
        lender, lent = _begin(site, comm, [counts[peer] for peer in peers], call)
        for peer, message in zip(peers, lent, strict=True):
            message.view(torch.float32).copy_(_values(site, comm.rank, call, counts[peer]))
        receives = [(peer, _empty(site, counts[comm.rank])) for peer in peers]
        transit = comm.post(list(zip(peers, lent, strict=True)), receives, "all-to-all", 0)
        for peer in peers:
            came = transit.wait_for(peer)
            assert came is not None
            found.append(came.view(torch.float32).clone())
            expected.append(_values(site, peer, call, counts[comm.rank]))
        lender.end()
    return torch.cat(found), torch.cat(expected)


def _growth(site: Site, comm: OneSidedComm) -> tuple[Tensor, Tensor]:
    """A message larger than all before it: the memory of all ranks must grow."""
    return _ring(site, comm, 4 * NUMBERS)


def _two_groups(site: Site, comm: OneSidedComm) -> tuple[Tensor, Tensor]:
    """Calls of all ranks and of groups of some in turn, in the same memory."""
    groups = [dist.group.WORLD]
    if site.ranks >= 4:
        middle = site.ranks // 2
        groups = [new_group(list(part)) for part in (range(middle), range(middle, site.ranks))]
    own = next(group for group in groups if group is not None and group.rank() >= 0)
    part = _comm(site, own)
    found, expected = zip(*[_ring(site, each) for each in (part, comm, part, comm)], strict=True)
    return torch.cat(found), torch.cat(expected)
