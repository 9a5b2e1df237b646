"""Muon: every matrix goes by the orthogonal part of its momentum, so that all directions learn alike.

Fewer steps than AdamW's to the same loss, for a few products of matrices each. A rank orthogonalises its
share of them and tells the others; torch's own Muon does all of them on every rank, in bfloat16, which many
CPUs have to emulate.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.train.ranks import full, local

ROUNDS = 5
CUBIC = 3.4445, -4.7750, 2.0315
"""Of Newton and Schulz's iteration: singular values come near 1 in few rounds, and need not come nearer."""
ADAMS = 0.2
"""The root mean square of AdamW's steps, over its rate: with it one rate does for both."""


class Muon(torch.optim.Optimizer):
    """Of matrices only, that are whole or sharded (FSDP2), the same ones on all ranks."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, *, decay: float = 0.0, momentum: float = 0.95
    ) -> None:
        super().__init__(matrices, {"lr": lr, "decay": decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's
        for group in self.param_groups:
            trained = [weight for weight in group["params"] if weight.grad is not None]
            directions = [full(self._momentum(weight, group["momentum"])) for weight in trained]
            for weight, direction in zip(trained, _orthogonal(directions), strict=True):
                mine = local(weight)
                mine.mul_(1 - group["lr"] * group["decay"])
                mine.add_(_part(direction, weight), alpha=-group["lr"] * ADAMS * max(weight.shape) ** 0.5)

    def _momentum(self, weight: nn.Parameter, share: float) -> Tensor:
        """Nesterov's: as it will be after one more of the same gradient."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(gradient, 1 - share)
        return gradient.lerp(state["momentum"], share)


def _orthogonal(matrices: list[Tensor]) -> list[Tensor]:
    """Each by one rank, and then known to all."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return [orthogonal(matrix) for matrix in matrices]
    for matrix in matrices[dist.get_rank() :: ranks]:
        matrix.copy_(orthogonal(matrix))
    sent = [dist.broadcast(each, number % ranks, async_op=True) for number, each in enumerate(matrices)]
    for message in sent:
        if message is not None:  # it is None only where this rank is not of the group
            message.wait()
    return matrices


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly: what is left of U S V is U V, with values between 0.7 and 1.2 for S."""
    a, b, c = CUBIC
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if len(x) > x.shape[1] else x
    for _ in range(ROUNDS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if x.shape != matrix.shape else x


def _part(whole: Tensor, like: Tensor) -> Tensor:
    """What this rank has of a tensor that all know."""
    if not isinstance(like, DTensor):
        return whole
    return local(distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None))
