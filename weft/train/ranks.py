"""Ranks: who shares a sequence with whom in training, and whose parameters are where.

Parameters are sharded over all ranks (FSDP2): a gradient is the mean over those that share a sequence, as
`weft.parallelize` leaves it, and over those that have other clips. So one mean over all ranks is both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from weft.core.errors import InputError
from weft.run.world import world_of


@dataclass(frozen=True, eq=False)
class Ranks:
    """A mesh of data × sequence; none if there is one rank."""

    mesh: DeviceMesh | None
    rank: int
    size: int
    sequence: int
    """Ranks that share a sequence."""

    @staticmethod
    def of(sequence: int) -> Ranks:
        comm = world_of(None, 600.0).comm
        sequence = sequence or comm.size
        if comm.size % sequence:
            raise InputError(
                f"{comm.size} ranks cannot be split into groups of {sequence}.",
                hint="Let parallel.sequence divide the ranks; 0 means all of them.",
            )
        if comm.size == 1:
            return Ranks(None, 0, 1, 1)
        shape = comm.size // sequence, sequence  # clips and noise are made on the CPU, and stay there so far
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "sequence"))
        return Ranks(mesh, comm.rank, comm.size, sequence)

    @property
    def groups(self) -> int:
        """Groups of ranks with clips of their own."""
        return self.size // self.sequence

    def part(self, clips: int) -> slice:
        """Which of a number of clips this rank has."""
        if clips % self.groups:
            raise InputError(
                f"{clips} clips at a time cannot be shared by {self.groups} groups of ranks.",
                hint="Let train.batch be a multiple of train.accumulate × ranks / parallel.sequence.",
            )
        each, group = clips // self.groups, self.rank // self.sequence
        return slice(group * each, (group + 1) * each)

    def shard(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        if self.mesh is None:
            return
        everyone = self.mesh._flatten("everyone")
        for block in blocks:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)

    @property
    def sharing(self) -> Any:
        """The ranks of this one's sequence, for `weft.parallelize`."""
        return None if self.mesh is None else self.mesh["sequence"]

    def mean(self, numbers: list[float]) -> list[float]:
        """Over all ranks."""
        if self.mesh is None:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return (total / self.size).tolist()


def local(x: Tensor) -> Tensor:
    """What a rank has of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x
