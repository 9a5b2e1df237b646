"""Ranks: who shares a sequence with whom in training, and whose parameters are where.

Parameters are sharded over all ranks (FSDP2), or each has all of them. A gradient is the mean over those
that share a sequence, as `weft.parallelize` leaves it, and over those that have other clips. So one mean over
all ranks is both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from weft.core.errors import InputError
from weft.run.devices import device
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
        shape = comm.size // sequence, sequence
        mesh = init_device_mesh(device().type, shape, mesh_dim_names=("data", "sequence"))
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
        """From now on gradients are means by themselves."""
        if self.mesh is None:
            return
        everyone = self.mesh._flatten("everyone")
        for block in blocks:
            fully_shard(block, mesh=everyone)
        fully_shard(model, mesh=everyone)

    def average(self, model: nn.Module) -> None:
        """The gradients of a model that is not sharded, over all ranks."""
        if self.mesh is None or isinstance(model, FSDPModule):
            return
        found = [weight.grad for weight in model.parameters() if weight.grad is not None]
        flat = torch.cat([gradient.flatten() for gradient in found])
        dist.all_reduce(flat)
        parts = flat.div_(self.size).split([gradient.numel() for gradient in found])
        for gradient, part in zip(found, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

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


def full(x: Tensor) -> Tensor:
    """All of a tensor; every rank that has a part of it asks."""
    return x.full_tensor() if isinstance(x, DTensor) else x
