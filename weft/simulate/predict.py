"""Predict: the time of a schedule on a topology: simulated or, for many ranks, that of its critical path.

The critical path takes link speeds and attention FLOPs alone: messages start when their exchange is reached
and leave a rank one after another; an Attend starts when its rank is free and its pieces have arrived. That
is cheaper than events, and leaves out what messages share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from weft.core.schedule import Attend, Piece
from weft.core.timeline import exposed
from weft.schedule.measure import attend_works
from weft.simulate.costs import attend_price, is_capped, send_seconds, shared_seconds
from weft.simulate.events import simulate

if TYPE_CHECKING:
    from weft.core.schedule import Schedule
    from weft.core.topology import Topology

MAX_RANKS_OF_EVENTS = 64
"""With more ranks, a planner that compares many schedules uses the critical path instead of events."""
COPIES_PER_EXCHANGE = 2  # packed before it, unpacked after it


@dataclass(frozen=True)
class Timing:
    """Seconds until the last rank is done, and what each rank spends computing and sending."""

    seconds: float
    compute: tuple[float, ...]
    sending: tuple[float, ...] = ()
    launching: float = 0.0
    """Seconds of them in which all devices are done and a host still launches."""
    exposed: float = 0.0
    """Share of the time in which the mean rank waits for data."""

    def __repr__(self) -> str:
        return f"Timing({self.seconds * 1e3:.3g} ms, {len(self.compute)} ranks, {self.exposed:.1%} exposed)"

    @property
    def waiting(self) -> float:
        """Seconds in which the busiest rank waits for data."""
        return self.seconds - self.launching - max(self.compute)


def predict(schedule: Schedule, topology: Topology, works: dict[int, int] | None = None) -> Timing:
    """Simulate the schedule that would run; return the critical path's timing for many ranks.

    `works` are those of `schedule.measure.attend_works`, if they are known already.
    """
    if schedule.problem.ranks > MAX_RANKS_OF_EVENTS:
        return critical_path(schedule, topology, works)
    timeline = simulate(schedule, topology, works, memory=False)
    sending, launching = [0.0] * timeline.ranks, 0.0
    for span in timeline.spans:
        if span.kind == "send":
            sending[span.rank] += span.end - span.start
        elif span.kind == "launch":
            launching = max(launching, span.end - span.start)
    compute = tuple(timeline.computing.tolist())
    return Timing(timeline.seconds, compute, tuple(sending), launching, timeline.exposed)


def critical_path(schedule: Schedule, topology: Topology, works: dict[int, int] | None = None) -> Timing:
    """Walk the operations once, with a clock for each rank and one for its sends."""
    works = attend_works(schedule) if works is None else works
    price = attend_price(schedule, topology) if schedule.mask is not None else None
    ranks = range(schedule.problem.ranks)
    clock = [0.0 for _ in ranks]
    wire = [0.0 for _ in ranks]
    compute, sending, waiting = ([0.0 for _ in ranks] for _ in range(3))
    arrivals: dict[int, list[tuple[Piece, float]]] = defaultdict(list)
    attends, collectives, posts, messages = ([0 for _ in ranks] for _ in range(4))
    for index, op in enumerate(schedule.ops):
        if isinstance(op, Attend):
            ready = [_ready(arrivals[op.rank], piece) for piece in (op.q, op.kv)]
            assert price is not None
            seconds = price(works[index], op)
            start = max(clock[op.rank], *ready)
            waiting[op.rank] += start - clock[op.rank]
            clock[op.rank] = start + seconds
            compute[op.rank] += seconds
            attends[op.rank] += 1
            continue
        for rank, ends in Counter(chain.from_iterable(op.messages)).items():
            if ends == 2 * (len(ranks) - 1):
                collectives[rank] += 1
            else:
                posts[rank] += 1
                messages[rank] += ends
        for (src, dst), pieces in op.messages.items():
            start = max(clock[src], wire[src], *(_ready(arrivals[src], piece) for piece in pieces))
            size = sum(piece.num_bytes(schedule.problem) for piece in pieces)
            seconds = send_seconds(topology, src, dst, size)
            wire[src] = start + seconds
            sending[src] += seconds
            paired = start + size / topology.pair_bandwidth if is_capped(topology, src, dst) else 0.0
            arrivals[dst] += [(piece, max(wire[src], paired)) for piece in pieces]
    for rank in ranks:
        end = max([clock[rank], *(time for _, time in arrivals[rank])])
        waiting[rank] += end - clock[rank]
        clock[rank] = end
    device = max(max(clock), shared_seconds(topology, compute, sending))
    host = max(
        topology.host.seconds(
            attends=attends[rank],
            copies=COPIES_PER_EXCHANGE * (collectives[rank] + posts[rank]),
            collectives=collectives[rank],
            posts=posts[rank],
            messages=messages[rank],
        )
        for rank in ranks
    )
    seconds, launching = max(device, host), max(0.0, host - device)
    return Timing(seconds, tuple(compute), tuple(sending), launching, exposed(waiting, seconds))


def _ready(arrivals: list[tuple[Piece, float]], wanted: Piece) -> float:
    times = [
        t
        for piece, t in arrivals
        if piece.tensor == wanted.tensor and (piece is wanted or piece.meets(wanted))
    ]
    return max(times, default=0.0)
