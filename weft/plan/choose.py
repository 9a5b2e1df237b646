"""Choose a strategy: build every candidate, time each on the topology, keep the fastest."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.partition import natural, zigzag
from weft.schedule.gather import gather
from weft.schedule.ring import ring
from weft.schedule.ulysses import ulysses
from weft.schedule.usp import usp
from weft.simulate.critical import Timing, critical_path

Builder = Callable[[Problem, BlockMask, Mesh, Partition], Schedule]
Partitioner = Callable[[Problem, BlockMask, Mesh], Partition]

STRATEGIES: dict[str, tuple[Builder, Partitioner, str]] = {
    "ulysses": (ulysses, natural, "ulysses"),
    "ring": (ring, natural, "ring"),
    "zigzag": (ring, zigzag, "ring"),
    "gather": (gather, natural, "ring"),
}


@dataclass(frozen=True)
class Plan:
    """A schedule, what it was chosen from, and why."""

    schedule: Schedule
    ranked: tuple[tuple[str, Timing], ...]

    def explain(self) -> str:
        """One line for each candidate, the best first."""
        best = self.ranked[0][1].seconds or 1.0
        lines = [
            f"{name:<12} {timing.seconds * 1e3:9.2f} ms   {timing.seconds / best:5.2f}×   "
            f"{timing.exposed:6.1%} exposed"
            for name, timing in self.ranked
        ]
        return "\n".join(lines)


def build(name: str, problem: Problem, mask: BlockMask) -> Schedule:
    """A schedule by its strategy's name: ulysses, ring, zigzag, gather, or usp:UxR."""
    if match := re.fullmatch(r"usp:(\d+)x(\d+)", name):
        heads, hops = int(match[1]), int(match[2])
        if heads * hops != problem.ranks or not heads:
            legal = ", ".join(usp_names(problem.ranks))
            raise InputError(
                f"{name} needs {heads * hops} ranks; there are {problem.ranks}.",
                hint=f"Legal here: {legal}.",
            )
        mesh = Mesh.of(ring=hops, ulysses=heads)
        return usp(problem, mask, mesh, natural(problem, mask, mesh))
    if name not in STRATEGIES:
        raise InputError(
            f"There is no strategy {name!r}.",
            hint=f"Use auto, {', '.join(STRATEGIES)} or usp:UxR.",
        )
    builder, partitioner, axis = STRATEGIES[name]
    mesh = Mesh(((axis, problem.ranks),))
    return builder(problem, mask, mesh, partitioner(problem, mask, mesh))


def usp_names(ranks: int) -> list[str]:
    return [f"usp:{u}x{ranks // u}" for u in range(1, ranks + 1) if ranks % u == 0]


def candidates(problem: Problem) -> list[str]:
    """Every way to cut ranks into heads × ring, and the selective gather."""
    ranks = problem.ranks
    if ranks == 1:
        return ["ring"]
    mixed = [f"usp:{u}x{ranks // u}" for u in range(2, ranks) if ranks % u == 0 and u <= problem.heads]
    return ["ulysses", "ring", "gather", *mixed]


def choose(problem: Problem, mask: BlockMask, topology: Topology | None = None) -> Plan:
    """The candidate with the shortest predicted time; ties go to the first in the list."""
    topology = topology or Topology.local(problem.ranks)
    if topology.ranks != problem.ranks:
        raise InputError(
            f"The topology {topology.name} has {topology.ranks} ranks, the tensors lie on {problem.ranks}."
        )
    built = {name: build(name, problem, mask) for name in candidates(problem)}
    timed = [(name, critical_path(schedule, topology)) for name, schedule in built.items()]
    ranked = tuple(sorted(timed, key=lambda item: item[1].seconds))
    return Plan(built[ranked[0][0]], ranked)
