"""Critical path: when each rank would be done, from link speeds and attention FLOPs alone.

Messages start when their exchange is reached and leave a rank one after another; an Attend starts
when its rank is free and its pieces are there. It is the planner's predictor.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from weft.core.schedule import Attend, Exchange, Piece, Schedule
from weft.core.topology import Topology
from weft.schedule.measure import attend_work

# A kernel call and its merge, whatever their size: measured in the order of 0.1 ms on CPUs.
CALL_SECONDS = 1e-4


@dataclass(frozen=True)
class Timing:
    """Seconds until the last rank is done, and what each rank spends computing."""

    seconds: float
    compute: tuple[float, ...]

    @property
    def exposed(self) -> float:
        """Share of the time in which the busiest rank does not compute."""
        return 1 - max(self.compute) / self.seconds if self.seconds else 0.0


def critical_path(schedule: Schedule, topology: Topology) -> Timing:
    ranks = range(schedule.problem.ranks)
    clock = [0.0 for _ in ranks]
    wire = [0.0 for _ in ranks]
    compute = [0.0 for _ in ranks]
    arrivals: dict[int, list[tuple[Piece, float]]] = defaultdict(list)
    per_pair = 4 * schedule.problem.head_dim * schedule.problem.batch
    for op in schedule.ops:
        if isinstance(op, Attend):
            ready = [_ready(arrivals[op.rank], piece) for piece in (op.q, op.kv)]
            seconds = CALL_SECONDS + per_pair * attend_work(schedule.mask, op) / topology.flops
            clock[op.rank] = max(clock[op.rank], *ready) + seconds
            compute[op.rank] += seconds
            continue
        for (src, dst), pieces in _messages(op).items():
            start = max(clock[src], wire[src], *(_ready(arrivals[src], piece) for piece in pieces))
            size = sum(piece.num_bytes(schedule.problem) for piece in pieces)
            wire[src] = start + topology.link(src, dst).seconds(size)
            arrivals[dst] += [(piece, wire[src]) for piece in pieces]
    for rank in ranks:
        clock[rank] = max([clock[rank], *(time for _, time in arrivals[rank])])
    return Timing(max(clock), tuple(compute))


def _messages(op: Exchange) -> dict[tuple[int, int], list[Piece]]:
    found: dict[tuple[int, int], list[Piece]] = {}
    for transfer in op.transfers:
        found.setdefault((transfer.src, transfer.dst), []).append(transfer.piece)
    return found


def _ready(arrivals: list[tuple[Piece, float]], wanted: Piece) -> float:
    times = [
        t for piece, t in arrivals if piece.tensor == wanted.tensor and (piece is wanted or piece & wanted)
    ]
    return max(times, default=0.0)
