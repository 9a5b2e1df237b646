"""Links: how fast ranks exchange messages, through the transport that attention uses.

Every rank calls every function here, in the same order: where only some of them exchange messages the others
call too, since beginning a call is one of all ranks in some transports. Results are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, count
from statistics import median
from typing import Any, NamedTuple

import torch

from weft.core.topology import Link
from weft.run.comm import Comm
from weft.run.comm.onesided import ALIGN
from weft.run.exchange import all_gather_json
from weft.run.stopwatch import device_seconds, low

SMALL = 64  # bytes
MANY = 9
MAX_PAIRS = 36
"""All pairs of 9 devices; of more devices, as many pairs spread over them."""
DIFFERS = 1.15
"""Links whose bandwidth differs by more are written one by one."""
IN_PLACE = 1e12
"""Bytes/s of messages that are read where they lie: they take no time by themselves."""


class Sizes(NamedTuple):
    """Bytes of a large message, and how often messages are timed."""

    large: int
    small_repeats: int
    large_repeats: int

    @staticmethod
    def of(device: torch.device, *, quick: bool = False) -> Sizes:
        if device.type == "cuda":
            return Sizes(64 << 20, 20, 8) if quick else Sizes(64 << 20, 40, 12)
        return Sizes(1 << 20, 10, 3) if quick else Sizes(8 << 20, 300, 10)


def pairs(devices: int) -> list[tuple[int, int]]:
    """Return the pairs of a machine's devices that are measured."""
    found = list(combinations(range(devices), 2))
    return found[:: -(-len(found) // MAX_PAIRS)] if found else []


def exchange(
    comm: Comm,
    device: torch.device,
    peers: Sequence[int],
    num_bytes: int,
    *,
    posts: int = 1,
    sources: Sequence[int] | None = None,
) -> Callable[[], None]:
    """Return a call that sends to all peers, and receives from them, at once; without any it only takes part.

    sources   the ranks to receive from, where they are others.
    """
    sources = peers if sources is None else sources
    own, landing = (
        {str(peer): torch.zeros(num_bytes, dtype=torch.uint8, device=device) for peer in ranks}
        for ranks in (peers, sources)
    )
    receives = [(peer, landing[str(peer)]) for peer in sources]
    calls = count()

    def call() -> None:
        lender = comm.begin(device)
        if lender and next(calls) == 0:
            lender.reserve(len(peers) * (num_bytes + ALIGN))
        if peers:
            out = lender.lend(dict.fromkeys(own, num_bytes)) if lender else own
            sends = [(peer, out[str(peer)]) for peer in peers]
            transits = [comm.post(sends, receives, "calibration", 0) for _ in range(posts)]
            for transit in transits:
                for peer in sources:
                    transit.wait_for(peer)
                transit.finish()
        if lender:
            lender.end()

    return call


def measure_pairs(
    comm: Comm, device: torch.device, together: Iterable[tuple[int, int]], sizes: Sizes
) -> list[Link]:
    """Return the links of pairs that exchange messages at the same time, as they do in a schedule.

    No rank is in two of them.
    """
    together = list(together)
    peers = [b if comm.rank == a else a for a, b in together if comm.rank in (a, b)]
    meet(comm)
    small = low(device_seconds(exchange(comm, device, peers, SMALL), device, sizes.small_repeats))
    large = small
    if not all(all_gather_json(_reads_in_place(comm, device, peers))):  # all ranks go the same way
        large = min(device_seconds(exchange(comm, device, peers, sizes.large), device, sizes.large_repeats))
    by_rank = all_gather_json([small, large])
    links: list[Link] = []
    for a, _ in together:
        latency, most = by_rank[a]
        seconds = max(most - latency, sizes.large / IN_PLACE)
        links.append(Link(latency=latency, bandwidth=sizes.large / seconds))
    return links


def _reads_in_place(comm: Comm, device: torch.device, peers: Sequence[int]) -> bool:
    """Whether nothing moves between peers: they read each other's memory."""
    lender = comm.begin(device)
    if lender is None:
        return False
    lender.end()
    return not lender.lands and set(peers) <= lender.near


def is_one_sided(comm: Comm, device: torch.device) -> bool:
    """Whether no message waits for its receiver. All ranks ask together."""
    lender = comm.begin(device)
    if lender:
        lender.end()
    return lender is not None


def measure_all_to_all(comm: Comm, device: torch.device, devices: int, sizes: Sizes) -> float:
    """Return the bytes/s that each device sends while all of its machine send to all others of it."""
    first = comm.rank // devices * devices
    peers = [rank for rank in range(first, first + devices) if rank != comm.rank]
    num_bytes = sizes.large // (devices - 1)
    meet(comm)
    taken = min(device_seconds(exchange(comm, device, peers, num_bytes), device, sizes.large_repeats))
    return num_bytes * len(peers) / max(all_gather_json(taken))


def measure_card(comm: Comm, device: torch.device, machines: int, sizes: Sizes) -> float:
    """Return the bytes/s that the devices of a machine send to the next one, while all machines do."""
    devices, num_bytes, posts = comm.size // machines, sizes.large // 4, 4
    before, after = ((comm.rank + step * devices) % comm.size for step in (-1, 1))
    shift = exchange(comm, device, [after], num_bytes, posts=posts, sources=[before])
    meet(comm)
    by_rank = all_gather_json(device_seconds(shift, device, 3))
    # Devices do not get equal shares, and the last one counts; the slow rounds have met other processes.
    return posts * devices * num_bytes / min(map(max, zip(*by_rank, strict=True)))


def measure_post(comm: Comm, device: torch.device, pair: tuple[int, int], sizes: Sizes) -> float:
    """Return what a call costs that starts a message or waits for it, besides the message itself."""
    peers = [pair[1 - pair.index(comm.rank)]] if comm.rank in pair else []
    meet(comm)
    few, many = (
        low(device_seconds(exchange(comm, device, peers, SMALL, posts=posts), device, sizes.small_repeats))
        for posts in (1, MANY)
    )
    return all_gather_json(max(0.0, many - few) / (2 * (MANY - 1)))[pair[0]]


def meet(comm: Comm) -> None:
    """Wait for all ranks; one that does not come is an error, on any transport."""
    comm.gather_numbers([0])


def fields(
    measured: Mapping[tuple[int, int], Link],
    devices: int,
    device: torch.device,
    all_to_all: float | None = None,
) -> dict[str, Any]:
    """Return what links by pair, and the bytes/s of an all-to-all, mean: as fields of a Topology."""
    inside = {pair: link for pair, link in measured.items() if pair[0] // devices == pair[1] // devices}
    found = _inside(inside, device, all_to_all) if inside else {}
    if between := [link for pair, link in measured.items() if pair not in inside]:
        found["inter"] = between[0]
    elif inside:
        found["inter"] = found["intra"]
    return found


def _inside(
    inside: Mapping[tuple[int, int], Link], device: torch.device, all_to_all: float | None
) -> dict[str, Any]:
    """Return the usual link of a machine, what differs from it, and what one pair may have of it."""
    usual = Link(
        latency=median(link.latency for link in inside.values()),
        bandwidth=median(link.bandwidth for link in inside.values()),
    )
    if device.type == "cpu":
        return {"intra": usual}  # ranks of a CPU are alike; what they share are its cores
    share = (all_to_all or usual.bandwidth) / usual.bandwidth
    if share > DIFFERS:  # each pair has a link of its own
        whole = replace(usual, bandwidth=usual.bandwidth * share)
        return {"intra": whole, "pair_bandwidth": usual.bandwidth, "links": ()}
    # Where all send at once they may share a bridge, and in a plan all do.
    share = share if share < 1 / DIFFERS else 1.0
    differing: list[tuple[int, int, Link]] = []
    for (a, b), link in sorted(inside.items(), key=lambda item: item[0]):
        if not 1 / DIFFERS <= link.bandwidth / usual.bandwidth <= DIFFERS:
            scaled = replace(link, bandwidth=link.bandwidth * share)
            differing += [(a, b, scaled), (b, a, scaled)]
    whole = replace(usual, bandwidth=usual.bandwidth * share)
    return {"intra": whole, "pair_bandwidth": 0.0, "links": tuple(differing)}
