"""Gather: heads over some ranks; of the others, each fetches the keys that its tiles need."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.mask import BlockMask
from weft.core.partition import Partition
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.assignment import AssignmentCost
from weft.plan.estimate import copy_seconds, launch_seconds, phase, scattered, sizes, spread, step_seconds
from weft.plan.strategy import Strategy
from weft.schedule.gather import gather


class GatherStrategy(Strategy):
    kind, order = "gather", 2

    @classmethod
    def candidates(cls, ulysses: int, ring: int, topology: Topology) -> Sequence[Strategy]:
        del topology
        return (cls(ulysses, ring),) if ring > 1 else ()

    def build(self, problem: Problem, mask: BlockMask, partition: Partition, topology: Topology) -> Schedule:
        return gather(problem, mask, self.mesh_on(topology), partition, name=str(self))

    def estimate(self, problem: Problem, topology: Topology, cost: AssignmentCost) -> float:
        """scatter + what is fetched, behind the tiles at home + the other tiles + return."""
        widest = cost.assignment.widest

        steps = step_seconds(self, problem, topology, cost)
        fetched = sizes(problem)[1] * (self.ring - 1) * cost.needed
        sending = phase(topology, (spread(topology, self.mesh_on(topology), "ring", widest), fetched))
        near, far = steps[:, :, 0].max(), steps[:, :, 1:].sum(axis=2).max(initial=0.0)
        between = max(near, sending) + far + copy_seconds(topology) * widest * fetched
        swaps = self.ulysses - 1
        launches = launch_seconds(
            topology, attends=2, collectives=1, posts=int(swaps > 0), messages=2 * swaps
        )
        seconds = scattered(self, problem, topology, cost, steps=steps, between=between, sending=sending)
        return max(launches, seconds)
