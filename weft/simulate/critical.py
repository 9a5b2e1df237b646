"""Critical path: when each rank would be done, from link speeds and attention FLOPs alone.

Messages start when their exchange is reached and leave a rank one after another; an Attend starts
when its rank is free and its pieces are there. Cheaper than events, and blind to what they share.

Where devices are processes that share the cores of a machine, nothing is hidden for free: copying a
byte through a socket takes the time of a core that could compute. Then no machine is done before its
cores have done all that its ranks compute and send.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Piece, Schedule
from weft.core.topology import Topology
from weft.schedule.measure import attend_works

ROW = 64  # queries that a kernel takes at a time where the mask has no blocks of its own


@dataclass(frozen=True)
class Timing:
    """Seconds until the last rank is done, and what each rank spends computing and sending."""

    seconds: float
    compute: tuple[float, ...]
    sending: tuple[float, ...] = ()

    @property
    def exposed(self) -> float:
        """Share of the time in which the busiest rank does not compute."""
        return max(0.0, 1 - max(self.compute) / self.seconds) if self.seconds else 0.0


def critical_path(schedule: Schedule, topology: Topology, works: dict[int, int] | None = None) -> Timing:
    """`works` are those of `schedule.measure.attend_works`, if they are known already."""
    works = attend_works(schedule) if works is None else works
    ranks = range(schedule.problem.ranks)
    clock = [0.0 for _ in ranks]
    wire = [0.0 for _ in ranks]
    compute, sending = [0.0 for _ in ranks], [0.0 for _ in ranks]
    arrivals: dict[int, list[tuple[Piece, float]]] = defaultdict(list)
    for index, op in enumerate(schedule.ops):
        if isinstance(op, Attend):
            ready = [_ready(arrivals[op.rank], piece) for piece in (op.q, op.kv)]
            seconds = attend_seconds(topology, schedule.problem, schedule.mask, works[index], op)
            clock[op.rank] = max(clock[op.rank], *ready) + seconds
            compute[op.rank] += seconds
            continue
        for (src, dst), pieces in _messages(op).items():
            start = max(clock[src], wire[src], *(_ready(arrivals[src], piece) for piece in pieces))
            size = sum(piece.num_bytes(schedule.problem) for piece in pieces)
            took = send_seconds(topology, src, dst, size)
            wire[src] = start + took
            sending[src] += took
            there = max(
                wire[src], start + size / topology.pair_bandwidth if capped(topology, src, dst) else 0.0
            )
            arrivals[dst] += [(piece, there) for piece in pieces]
    for rank in ranks:
        clock[rank] = max([clock[rank], *(time for _, time in arrivals[rank])])
    seconds = max(max(clock), shared_seconds(topology, compute, sending))
    return Timing(seconds, tuple(compute), tuple(sending))


def send_seconds(topology: Topology, src: int, dst: int, num_bytes: int) -> float:
    """One message, while the other devices of its machine send theirs."""
    link = topology.link(src, dst)
    bandwidth = link.bandwidth
    if topology.nic_bandwidth and topology.machine(src) != topology.machine(dst):
        bandwidth = min(bandwidth, topology.nic_bandwidth / topology.devices)
    return link.latency + (num_bytes + topology.half_bytes) / bandwidth


def capped(topology: Topology, src: int, dst: int) -> bool:
    """Whether a pair has less than a device; its messages to others go on meanwhile."""
    return topology.pair_bandwidth > 0 and topology.link(src, dst) is topology.intra


def attend_seconds(
    topology: Topology, problem: Problem, mask: BlockMask, pairs: float, op: Attend | None = None
) -> float:
    """One call over so many active (head, query token, key token) triples.

    With `op`, its sizes are looked up among the topology's measured calls, and no call is faster than
    memory gives it its operands.
    """
    flops = 4 * problem.head_dim * problem.batch * pairs
    call = topology.call_seconds
    if op is not None and topology.row_seconds:
        call += topology.row_seconds * block_rows(problem, mask, op.q.heads.size, op.q.tokens.size)
    if op is not None and (speed := measured_speed(topology, problem, mask, pairs, op)):
        return call + flops / speed
    tiles = 0.0 if mask.is_dense else problem.batch * pairs / (mask.block_q * mask.block_k)
    busy = flops / topology.flops + tiles * topology.tile_seconds
    if op is not None and topology.memory_bandwidth:
        moved = 2 * op.q.num_bytes(problem) + op.kv.num_bytes(problem)
        busy = max(busy, moved / topology.memory_bandwidth)
    return call + busy


def block_rows(problem: Problem, mask: BlockMask, heads: float, tokens: float) -> float:
    """Rows of blocks, by head, that a call over so many heads and queries goes through."""
    return problem.batch * heads * tokens / (ROW if mask.is_dense else mask.block_q)


def measured_speed(
    topology: Topology, problem: Problem, mask: BlockMask, pairs: float, op: Attend
) -> float | None:
    """FLOP/s of the nearest measured call, if one is within a factor of two in each of its sizes."""
    if not topology.attention or not pairs:
        return None
    rows, cols = op.q.tokens.size, op.kv.tokens.size
    density = pairs / (op.q.heads.size * rows * cols)
    block = math.sqrt(rows * cols if mask.is_dense else mask.block_q * mask.block_k)
    sizes = (math.sqrt(rows * cols), density, block, problem.head_dim)
    found: list[tuple[float, float]] = []
    for row in topology.attention:
        # A dense call is one tile, so its block says nothing that its tokens have not said.
        given = (row.tokens, row.density, block if density == row.density == 1 else row.block, row.head_dim)
        apart = [abs(math.log2(a / b)) for a, b in zip(sizes, given, strict=True)]
        if max(apart) <= 1:
            found.append((sum(apart), row.flops))
    return min(found, key=lambda item: item[0])[1] if found else None


def shared_seconds(topology: Topology, compute: list[float], sending: list[float]) -> float:
    """When the cores of the busiest machine are done with everything; 0 where nothing is shared."""
    if not topology.cores:
        return 0.0
    busy = [0.0] * topology.machines
    for rank in range(topology.ranks):
        # Where there are several machines, most of what is sent waits for the network and not for a core.
        busy[topology.machine(rank)] += compute[rank] + sending[rank] * (topology.machines == 1)
    return max(busy) / min(topology.cores, topology.devices)


def _messages(op: Exchange) -> dict[tuple[int, int], list[Piece]]:
    found: dict[tuple[int, int], list[Piece]] = {}
    for transfer in op.transfers:
        found.setdefault((transfer.src, transfer.dst), []).append(transfer.piece)
    return found


def _ready(arrivals: list[tuple[Piece, float]], wanted: Piece) -> float:
    times = [
        t
        for piece, t in arrivals
        if piece.tensor == wanted.tensor and (piece is wanted or piece.meets(wanted))
    ]
    return max(times, default=0.0)
