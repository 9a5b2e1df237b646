"""Links: measure how fast ranks exchange messages, through the transport that attention uses.

All ranks call these functions together, even where only some exchange messages: some transports begin a call
on all ranks. Results are the same on all ranks.
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
from weft.run.measure.stopwatch import device_seconds, lowest_eighth

SMALL_BYTES = 64
MANY_POSTS = 9
MAX_PAIRS = 36
"""All pairs of 9 devices; of more devices, as many pairs spread over them."""
MAX_BANDWIDTH_RATIO = 1.15
"""Links whose bandwidth differs by more get an entry of their own."""
IN_PLACE_BANDWIDTH = 1e12
"""Bytes/s of messages that are read in place: they take no time by themselves."""


class MessageSizes(NamedTuple):
    """Bytes of a large message, and how often messages are timed."""

    large: int
    small_repeats: int
    large_repeats: int

    @staticmethod
    def of(device: torch.device, *, quick: bool = False) -> MessageSizes:
        if device.type == "cuda":
            return MessageSizes(64 << 20, 20, 8) if quick else MessageSizes(64 << 20, 40, 12)
        return MessageSizes(1 << 20, 10, 3) if quick else MessageSizes(8 << 20, 300, 10)


def pairs(devices: int) -> list[tuple[int, int]]:
    """Return the pairs of a machine's devices that are measured."""
    every = list(combinations(range(devices), 2))
    return every[:: -(-len(every) // MAX_PAIRS)] if every else []


def exchange(
    comm: Comm,
    device: torch.device,
    peers: Sequence[int],
    num_bytes: int,
    *,
    posts: int = 1,
    sources: Sequence[int] | None = None,
) -> Callable[[], None]:
    """Return a call that sends to all peers and receives from them at once; without peers it only takes part.

    sources   the ranks to receive from; by default the peers.
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
    comm: Comm, device: torch.device, together: Iterable[tuple[int, int]], sizes: MessageSizes
) -> list[Link]:
    """Return the links of pairs that exchange messages at the same time, as they do in a schedule.

    No rank is in two of them.
    """
    together = list(together)
    peers = [b if comm.rank == a else a for a, b in together if comm.rank in (a, b)]
    barrier(comm)
    small = lowest_eighth(
        device_seconds(exchange(comm, device, peers, SMALL_BYTES), device, sizes.small_repeats)
    )
    large = small
    if not all(all_gather_json(_reads_in_place(comm, device, peers))):  # the same branch on all ranks
        large = min(device_seconds(exchange(comm, device, peers, sizes.large), device, sizes.large_repeats))
    by_rank = all_gather_json([small, large])
    links: list[Link] = []
    for a, _ in together:
        latency, most = by_rank[a]
        seconds = max(most - latency, sizes.large / IN_PLACE_BANDWIDTH)
        links.append(Link(latency=latency, bandwidth=sizes.large / seconds))
    return links


def _reads_in_place(comm: Comm, device: torch.device, peers: Sequence[int]) -> bool:
    """Return whether peers read each other's memory, so that no bytes move."""
    lender = comm.begin(device)
    if lender is None:
        return False
    lender.end()
    return not lender.lands and set(peers) <= lender.near


def is_one_sided(comm: Comm, device: torch.device) -> bool:
    """Return whether no message waits for its receiver. All ranks call this together."""
    lender = comm.begin(device)
    if lender:
        lender.end()
    return lender is not None


def measure_all_to_all(comm: Comm, device: torch.device, devices: int, sizes: MessageSizes) -> float:
    """Return the bytes/s that each device sends while all devices of a machine send to all others in it."""
    first = comm.rank // devices * devices
    peers = [rank for rank in range(first, first + devices) if rank != comm.rank]
    num_bytes = sizes.large // (devices - 1)
    barrier(comm)
    taken = min(device_seconds(exchange(comm, device, peers, num_bytes), device, sizes.large_repeats))
    return num_bytes * len(peers) / max(all_gather_json(taken))


def measure_card(comm: Comm, device: torch.device, machines: int, sizes: MessageSizes) -> float:
    """Return the bytes/s that the devices of a machine send to the next one, while all machines do."""
    devices, num_bytes, posts = comm.size // machines, sizes.large // 4, 4
    before, after = ((comm.rank + step * devices) % comm.size for step in (-1, 1))
    shift = exchange(comm, device, [after], num_bytes, posts=posts, sources=[before])
    barrier(comm)
    by_rank = all_gather_json(device_seconds(shift, device, 3))
    # Devices do not get equal shares, and the last one counts; slow rounds were disturbed by other processes.
    return posts * devices * num_bytes / min(map(max, zip(*by_rank, strict=True)))


def measure_post(comm: Comm, device: torch.device, pair: tuple[int, int], sizes: MessageSizes) -> float:
    """Return the seconds of a call that starts a message or waits for it, without the message itself."""
    peers = [pair[1 - pair.index(comm.rank)]] if comm.rank in pair else []
    barrier(comm)
    few, many = (
        lowest_eighth(
            device_seconds(
                exchange(comm, device, peers, SMALL_BYTES, posts=posts), device, sizes.small_repeats
            )
        )
        for posts in (1, MANY_POSTS)
    )
    return all_gather_json(max(0.0, many - few) / (2 * (MANY_POSTS - 1)))[pair[0]]


def barrier(comm: Comm) -> None:
    """Wait for all ranks; a missing one is an error, on any transport."""
    comm.all_gather_ints([0])


def topology_fields(
    measured: Mapping[tuple[int, int], Link],
    devices: int,
    device: torch.device,
    all_to_all: float | None = None,
) -> dict[str, Any]:
    """Return the fields of a Topology for measured links and the bytes/s of an all-to-all."""
    inside = {pair: link for pair, link in measured.items() if pair[0] // devices == pair[1] // devices}
    topology_fields = _inside(inside, device, all_to_all) if inside else {}
    if between := [link for pair, link in measured.items() if pair not in inside]:
        topology_fields["inter"] = between[0]
    elif inside:
        topology_fields["inter"] = topology_fields["intra"]
    return topology_fields


def _inside(
    inside: Mapping[tuple[int, int], Link], device: torch.device, all_to_all: float | None
) -> dict[str, Any]:
    """Return the usual link of a machine, the links that differ from it, and the bandwidth of one pair."""
    usual = Link(
        latency=median(link.latency for link in inside.values()),
        bandwidth=median(link.bandwidth for link in inside.values()),
    )
    if device.type == "cpu":
        return {"intra": usual}  # ranks of a CPU are alike; what they share are its cores
    share = (all_to_all or usual.bandwidth) / usual.bandwidth
    differing: list[tuple[int, int, Link]] = []
    pair_bandwidth = 0.0
    if share > MAX_BANDWIDTH_RATIO:  # each pair has a link of its own
        pair_bandwidth = usual.bandwidth
    else:
        # Devices that all send at once may share a bridge, and in a plan all do.
        share = share if share < 1 / MAX_BANDWIDTH_RATIO else 1.0
        for (a, b), link in sorted(inside.items(), key=lambda item: item[0]):
            if not 1 / MAX_BANDWIDTH_RATIO <= link.bandwidth / usual.bandwidth <= MAX_BANDWIDTH_RATIO:
                scaled = replace(link, bandwidth=link.bandwidth * share)
                differing += [(a, b, scaled), (b, a, scaled)]
    intra = replace(usual, bandwidth=usual.bandwidth * share)
    return {"intra": intra, "pair_bandwidth": pair_bandwidth, "links": tuple(differing)}
