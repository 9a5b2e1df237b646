"""Ulysses: each rank takes some heads of all tokens; one exchange in, one exchange home."""

from __future__ import annotations

from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.schedule.usp import usp


def ulysses(
    problem: Problem, mask: BlockMask, mesh: Mesh, partition: Partition, *, name: str = "ulysses"
) -> Schedule:
    """USP whose ring has one rank."""
    flat = Mesh.of(ulysses=mesh.ranks)
    return usp(problem, mask, flat, partition, name=name)
