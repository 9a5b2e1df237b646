"""USP: heads over some ranks, rings over the others; Ulysses and the ring are its two ends."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.assignment import AssignmentCost
from weft.plan.estimate import launch_seconds, neighbour, phase, scattered, sizes, step_seconds
from weft.plan.strategy import Strategy
from weft.schedule.usp import usp


class Usp(Strategy):
    kind, order = "usp", 0

    @classmethod
    def short(cls, ranks: int) -> dict[str, tuple[int, int]]:
        return {"ring": (1, ranks), "ulysses": (ranks, 1)}

    @classmethod
    def candidates(cls, ulysses: int, ring: int, topology: Topology) -> Sequence[Strategy]:
        del topology
        return (cls(ulysses, ring),)

    def build(self, problem: Problem, mask: BlockMask, partition: Partition, topology: Topology) -> Schedule:
        mesh = self.mesh_on(topology)
        if self.ulysses == 1:
            mesh = Mesh.of(ring=mesh.ranks)
        elif self.ring == 1:
            mesh = Mesh.of(ulysses=mesh.ranks)
        return usp(problem, mask, mesh, partition, name=str(self))

    def estimate(self, problem: Problem, topology: Topology, cost: AssignmentCost) -> float:
        """scatter + Σ over ring steps of max(compute of the slowest rank, one hop) + return."""

        steps = step_seconds(self, problem, topology, cost)
        slowest = steps.max(axis=(0, 1))
        link = neighbour(topology, self.mesh_on(topology), cost.assignment.widest)
        hop = phase(topology, (link, sizes(problem)[1])) if self.ring > 1 else 0.0
        between = sum(max(step, hop) for step in slowest[:-1]) + slowest[-1]
        swaps, passes = self.ulysses - 1, self.ring - 1
        between_all = 2 * (passes == 0 < swaps)
        launches = launch_seconds(
            topology,
            attends=self.ring,
            collectives=between_all,
            posts=2 * (swaps > 0) + passes - between_all,
            messages=4 * swaps * (passes > 0) + 2 * passes,
        )
        sending = hop * (self.ring - 1)
        seconds = scattered(self, problem, topology, cost, steps=steps, between=between, sending=sending)
        return max(launches, seconds)
