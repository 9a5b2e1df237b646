"""Ring: each rank keeps its rows; keys and values travel once around, overlapped with attention."""

from __future__ import annotations

from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.schedule.usp import usp


def ring(
    problem: Problem, mask: BlockMask, mesh: Mesh, partition: Partition, *, name: str = "ring"
) -> Schedule:
    """USP whose heads are not cut; contiguous or zigzag is a matter of the partition."""
    flat = Mesh.of(ring=mesh.ranks)
    return usp(problem, mask, flat, partition, name=name)
