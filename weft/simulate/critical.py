"""Critical path: when each rank would be done, from link speeds and attention FLOPs alone.

Messages start when their exchange is reached and leave a rank one after another; an Attend starts
when its rank is free and its pieces are there. It is the planner's predictor.

Where devices are processes that share the cores of a machine, nothing is hidden for free: copying a
byte through a socket takes the time of a core that could compute. Then no machine is done before its
cores have done all that its ranks compute and send.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Piece, Schedule
from weft.core.topology import Topology
from weft.schedule.measure import attend_works


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
            seconds = attend_seconds(topology, schedule.problem, schedule.mask, works[index])
            clock[op.rank] = max(clock[op.rank], *ready) + seconds
            compute[op.rank] += seconds
            continue
        for (src, dst), pieces in _messages(op).items():
            start = max(clock[src], wire[src], *(_ready(arrivals[src], piece) for piece in pieces))
            size = sum(piece.num_bytes(schedule.problem) for piece in pieces)
            took = topology.link(src, dst).seconds(size)
            wire[src] = start + took
            sending[src] += took
            arrivals[dst] += [(piece, wire[src]) for piece in pieces]
    for rank in ranks:
        clock[rank] = max([clock[rank], *(time for _, time in arrivals[rank])])
    seconds = max(max(clock), shared_seconds(topology, compute, sending))
    return Timing(seconds, tuple(compute), tuple(sending))


def attend_seconds(topology: Topology, problem: Problem, mask: BlockMask, pairs: float) -> float:
    """One call over so many active (head, query token, key token) triples."""
    flops = 4 * problem.head_dim * problem.batch * pairs
    tiles = 0.0 if mask.is_dense else problem.batch * pairs / (mask.block_q * mask.block_k)
    return topology.call_seconds + flops / topology.flops + tiles * topology.tile_seconds


def shared_seconds(topology: Topology, compute: list[float], sending: list[float]) -> float:
    """When the cores of the busiest machine are done with everything; 0 where nothing is shared."""
    if not topology.cores:
        return 0.0
    busy = [0.0] * topology.machines
    for rank in range(topology.ranks):
        busy[topology.machine(rank)] += compute[rank] + sending[rank]
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
