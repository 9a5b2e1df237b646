"""TrainingMesh: the device mesh of a training run, data × sequence, with gradient averaging and FSDP2.

A gradient is averaged over the ranks that share a sequence (as `weft.parallelize` leaves it) and over those
with other clips. One mean over all ranks is both.
"""

from __future__ import annotations

from dataclasses import dataclass

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
class TrainingMesh:
    """A mesh of data × sequence; None with one rank."""

    mesh: DeviceMesh | None
    rank: int
    size: int
    sequence: int
    """Ranks that share a sequence."""

    @staticmethod
    def of(sequence: int) -> TrainingMesh:
        comm = world_of(None, 600.0).comm
        sequence = sequence or comm.size
        if comm.size % sequence:
            raise InputError(
                f"{comm.size} ranks cannot be split into groups of {sequence}.",
                hint="parallel.sequence must divide the number of ranks; 0 means all of them.",
            )
        if comm.size == 1:
            return TrainingMesh(None, 0, 1, 1)
        shape = comm.size // sequence, sequence
        mesh = init_device_mesh(device().type, shape, mesh_dim_names=("data", "sequence"))
        return TrainingMesh(mesh, comm.rank, comm.size, sequence)

    @property
    def sequence_mesh(self) -> DeviceMesh | None:
        """The ranks that share this rank's sequence, for `weft.parallelize`."""
        return None if self.mesh is None else self.mesh["sequence"]

    def local_clips(self, clips: int) -> slice:
        """Return which of `clips` clips this rank trains on."""
        groups = self.size // self.sequence
        if clips % groups:
            raise InputError(
                f"{clips} clips at a time cannot be divided among {groups} groups of ranks.",
                hint="train.batch must be a multiple of train.accumulate × ranks / parallel.sequence.",
            )
        count, group = clips // groups, self.rank // self.sequence
        return slice(group * count, (group + 1) * count)

    def shard(self, model: nn.Module, blocks: nn.ModuleList) -> None:
        """Shard the parameters over all ranks (FSDP2), which then also averages their gradients."""
        if self.mesh is None:
            return
        all_ranks = self.mesh._flatten("all_ranks")
        for module in (*blocks, model):
            fully_shard(module, mesh=all_ranks)

    def average_gradients(self, model: nn.Module) -> None:
        """Average gradients over all ranks, unless FSDP already does."""
        if self.mesh is None or isinstance(model, FSDPModule):
            return
        grads = [weight.grad for weight in model.parameters() if weight.grad is not None]
        all_reduce_flat(grads, self.size)

    def mean(self, numbers: list[float]) -> list[float]:
        """Average numbers over all ranks."""
        if self.mesh is None:
            return numbers
        total = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(total)
        return (total / self.size).tolist()


def all_reduce_flat(grads: list[Tensor], divisor: float) -> None:
    """Sum gradients over all ranks in one message and divide them, in place."""
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    for grad, mean in zip(grads, flat.div_(divisor).split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


def local(x: Tensor) -> Tensor:
    """Return this rank's shard of a tensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def full(x: Tensor) -> Tensor:
    """Return the whole tensor; a collective call for a DTensor."""
    return x.full_tensor() if isinstance(x, DTensor) else x
