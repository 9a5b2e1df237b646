"""Torus: heads between machines in stages, each hidden behind the attention of the one before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.core.partition import Partition
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.assignment import AssignmentCost
from weft.plan.estimate import LinkCost, launch_seconds, moves, phase, sizes, spread
from weft.plan.strategy import Strategy, most_machines
from weft.schedule.torus import torus
from weft.simulate.costs import shared_seconds

CHUNKS = (1, 2, 3)


@dataclass(frozen=True)
class Torus(Strategy):
    kind, order, across, costly = "torus", 3, True, True
    options = r"(?:c(?P<chunks>\d+))?(?:d(?P<defer>\d+))?"

    chunks: int = 1
    """Parts of what comes from one machine."""
    defer: int | None = None
    """Stages whose keys the queries at home meet only at the end; None: all."""

    def __post_init__(self) -> None:
        if not self.chunks:
            raise InputError(f"{self}: c0 leaves nothing to send.", hint="Use c1 or more.")

    @property
    def tail(self) -> str:
        chunks = "" if self.chunks == 1 else f"c{self.chunks}"
        return chunks + ("" if self.defer is None else f"d{self.defer}")

    @classmethod
    def short(cls, ranks: int) -> dict[str, tuple[int, int]]:
        del ranks
        return {}

    @classmethod
    def candidates(cls, ulysses: int, ring: int, topology: Topology) -> Sequence[Strategy]:
        if topology.machines == 1 or most_machines(ulysses, topology.machines, topology.devices) == 1:
            return ()
        return [cls(ulysses, ring, chunks=chunks) for chunks in CHUNKS]

    def tuned(self, topology: Topology) -> Sequence[Strategy]:
        """Any number of stages put off, most first: that is right where the wire decides."""
        stages = (topology.machines - 1) * self.chunks
        return [replace(self, defer=put_off) for put_off in range(stages, -1, -1)]

    def build(self, problem: Problem, mask: BlockMask, partition: Partition, topology: Topology) -> Schedule:
        return torus(
            problem,
            mask,
            self.mesh_on(topology),
            partition,
            machines=topology.machines,
            chunks=self.chunks,
            defer=self.defer,
            name=str(self),
        )

    def estimate(self, problem: Problem, topology: Topology, cost: AssignmentCost) -> float:
        """Two clocks, of the wire and of the slowest rank, through its stages."""
        compute, widest = cost.seconds.sum(axis=2), cost.assignment.widest
        staged, sent = _stages(topology, self, sizes(problem), float(compute.max()), widest)
        rows, columns = moves(problem, cost)
        link = spread(topology, self.mesh_on(topology), "ring", widest)
        moving = phase(topology, (link, rows + columns + rows))
        shared = shared_seconds(topology, compute.ravel().tolist(), [sent] * problem.ranks)
        return float(max(staged + moving, shared, self._launches(topology)))

    def _launches(self, topology: Topology) -> float:
        """Return the host seconds of the launches in `_stages`: pulls of queries and keys, outputs, rings."""
        machines = topology.machines
        torus = most_machines(self.ulysses, machines, topology.devices)
        inside = self.ulysses // torus
        hops = topology.devices // inside
        rows, stages = (torus - 1) * self.chunks, (machines - 1) * self.chunks
        late = stages if self.defer is None else min(self.defer, stages)
        pulls, rings = 2 * rows + stages, (1 + stages) * (hops - 1)
        return launch_seconds(
            topology,
            attends=hops * (2 * rows + stages + max(1, late)),
            posts=4 + pulls + rings,
            messages=2 * (pulls + rings + (torus + 3) * (inside - 1)),
        )


def _stages(
    topology: Topology, strategy: Torus, bytes_: tuple[float, float], compute: float, widest: float
) -> tuple[float, float]:
    """Seconds in all, and of sending; `compute` is that of the slowest rank, `bytes_` a rank's q and kv."""
    machines, chunks, (q, kv) = topology.machines, strategy.chunks, bytes_
    torus = most_machines(strategy.ulysses, machines, topology.devices)
    inside = strategy.ulysses // torus
    hops, stages = topology.devices // inside, (machines - 1) * chunks
    late = 0 if torus == 1 else stages if strategy.defer is None else min(strategy.defer, stages)
    byte, latency = widest / topology.intra.bandwidth, topology.intra.latency
    near, around = LinkCost(latency, byte, inside - 1), LinkCost(latency, byte, hops - 1)
    share = (inside - 1) / inside
    # Neighbors on the Ulysses axis share a machine: with more heads, its network card sends more.
    card = topology.devices / topology.nic_bandwidth if topology.nic_bandwidth else 0.0
    away = LinkCost(0.0, widest * max(1 / topology.inter.bandwidth, card), 1)
    pull_q, pull_kv = (phase(topology, (away, size / torus / chunks)) for size in (q, kv))
    passing = phase(topology, (around, kv / torus / chunks * (hops - 1)))
    unit, call = compute / (torus * machines), topology.call_seconds * hops
    wire = sent = phase(topology, (near, q * share))
    clock = phase(topology, (near, (q + kv) * share)) + max(unit + call, passing * chunks)
    rows = (torus - 1) * chunks
    posted = [0.0] * chunks  # a pull is posted so many stages before it is used
    for _ in range(rows):
        wire = max(wire, posted[-chunks]) + pull_q
        posted.append(clock)
        clock = max(clock, wire + topology.inter.latency) + unit / chunks + call
    for stage in range(1, stages + 1):
        wire = max(wire, posted[-chunks]) + pull_kv
        posted.append(clock)
        own = (stage <= stages - late) * (unit / chunks + call)
        clock = max(clock, wire + topology.inter.latency)
        if stage < stages:
            clock += max(passing, (torus - 1) * unit / chunks + own + call * (not own))
            continue
        for _ in range(rows):
            clock += unit / chunks**2 + call
            wire = max(wire, clock) + pull_q
        clock += own
    clock += late * (unit / chunks + call)
    back = phase(topology, (near, q * share / torus))
    sent += 2 * rows * pull_q + stages * (pull_kv + passing) + back
    return max(clock, wire + topology.inter.latency) + back, sent
