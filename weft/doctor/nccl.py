"""NCCL (in a rehearsal gloo): all ranks meet, exchange numbers by weft's own groups, and in halves."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from weft.doctor.part import Check, Site
from weft.run.comm.group import GroupComm
from weft.run.groups import new_group

NUMBERS = 1 << 20
"""Of each message; small enough to take no time, large enough for more than one packet on any link."""

TIMEOUT_SECONDS = 30.0
"""Before the limit of the part, so that the watcher names the rank that is late."""


def checks(site: Site) -> Iterator[Check]:
    world = dist.group.WORLD
    assert world is not None
    comm = GroupComm(world, TIMEOUT_SECONDS)
    if site.begins("all ranks meet"):
        began = time.perf_counter()
        comm.warm_up(site.device)
        rows = comm.gather_numbers([site.rank, site.ranks])
        expected = [[rank, site.ranks] for rank in range(site.ranks)]
        seconds = time.perf_counter() - began
        found = (torch.tensor(rows), torch.tensor(expected))
        yield site.judged("all ranks meet", *found, allowed=0.0, seconds=seconds)
    if site.begins("all_reduce"):
        values = _values(site, site.rank)
        dist.all_reduce(values)
        expected = sum((_values(site, rank) for rank in range(1, site.ranks)), _values(site, 0))
        yield site.judged("all_reduce", values, expected, allowed=0.0)
    if site.begins("ring of messages"):
        yield site.judged("ring of messages", *_ring(site, comm), allowed=0.0)
    if site.begins("all_to_all"):
        yield site.judged("all_to_all", *_all_to_all(site, comm), allowed=0.0)
    yield from _halves(site)


def _values(site: Site, rank: int, count: int = NUMBERS) -> Tensor:
    """Return whole numbers that tell ranks and places apart, exact in float64 for any number of ranks."""
    return torch.arange(count, device=site.device, dtype=torch.float64).remainder_(1009).add_(1009 * rank)


def _ring(site: Site, comm: GroupComm) -> tuple[Tensor, Tensor]:
    """Send to the next rank and receive from the one before, as ring attention does."""
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    received = torch.zeros(NUMBERS, device=site.device, dtype=torch.float64)
    if comm.size == 1:
        return received, received
    comm.post([(after, _values(site, comm.rank))], [(before, received)], "ring", 1).finish()
    return received, _values(site, before)


def _all_to_all(site: Site, comm: GroupComm) -> tuple[Tensor, Tensor]:
    """Send each rank its own part of the numbers, of different lengths, as ulysses does."""
    lengths = [1000 + 10 * rank for rank in range(comm.size)]
    sends = torch.cat([_values(site, comm.rank, length) for length in lengths])
    expected = torch.cat([_values(site, rank, lengths[comm.rank]) for rank in range(comm.size)])
    receives = torch.zeros_like(expected)
    outgoing = list(enumerate(sends.split(lengths)))
    incoming = list(enumerate(receives.split(lengths[comm.rank])))
    if comm.size == 1:
        return sends, expected
    comm.all_to_all(outgoing, incoming, "all_to_all").finish()
    return receives, expected


def _halves(site: Site) -> Iterator[Check]:
    """Both halves of the ranks at once: their groups must not wait for each other."""
    if site.ranks < 2:
        if site.begins("halves"):
            yield Check(name="halves", status="skipped", note="there is one rank only")
        return
    if site.begins("halves"):
        middle = site.ranks // 2
        parts = [range(middle), range(middle, site.ranks)]
        groups = [new_group(list(part)) for part in parts]
        own = int(site.rank >= middle)
        group = groups[own]
        assert group is not None
        half = GroupComm(group, TIMEOUT_SECONDS)
        half.warm_up(site.device)
        values = _values(site, site.rank)
        dist.all_reduce(values, group=group)
        expected = sum((_values(site, rank) for rank in parts[own][1:]), _values(site, parts[own][0]))
        yield site.judged("halves", values, expected, allowed=0.0)
