"""Optimizers of a run: AdamW and Muon, the learning-rate schedule, and the EMA of the weights.

Muon moves each matrix by the orthogonal factor of its momentum, so that all directions learn at one rate. It
needs fewer steps than AdamW for the same loss, at the cost of a few products per matrix. Each rank
orthogonalizes its share of the matrices and broadcasts them; torch's own Muon does all of them on every rank,
in bfloat16, which many CPUs have to emulate.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from weft.train.mesh import full, local
from weft.train.recipe import TrainConfig

NEWTON_SCHULZ_STEPS = 5
NEWTON_SCHULZ_COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""They bring singular values near 1 in few steps; exactly 1 is not needed."""
ADAMW_RMS = 0.2
"""Root mean square of AdamW's updates over its lr: scaled to it, Muon takes the same lr."""


def make_optimizers(model: nn.Module, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """Return AdamW for all weights, or Muon for the matrices inside blocks and AdamW for the rest.

    The matrices at both ends of the model, like vectors, learn better by AdamW.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    inner = [name for name in trained if name.startswith("blocks.") and name.endswith(".weight")]
    is_muon = config.optimizer == "muon"
    matrices = [trained.pop(name) for name in inner if trained[name].dim() == 2 and is_muon]
    muon = [Muon(matrices, config.lr, weight_decay=config.weight_decay)] if matrices else []
    return [adamw(trained.values(), config), *muon]


def adamw(weights: Iterable[nn.Parameter], config: TrainConfig) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices, not on biases, norms and tables."""
    trained = list(weights)
    groups = (
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    )
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=(0.9, 0.95), fused=True
    )


def lr_at(config: TrainConfig, step: int) -> float:
    """Return the learning rate of step 1, 2, …: linear warmup to `config.lr`, then a cosine."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    done = (step - config.warmup) / max(1, config.steps - config.warmup)
    low = config.floor * config.lr
    return low + (config.lr - low) * (1 + math.cos(math.pi * min(1.0, done))) / 2


@torch.no_grad()
def update_ema(averages: Iterable[Tensor], weights: Iterable[Tensor], decay: float, step: int) -> None:
    """Move averages towards weights; faster in the first steps, whose weights should soon be forgotten."""
    decay = min(decay, (1 + step) / (10 + step))
    for average, weight in zip(averages, weights, strict=True):
        local(average).lerp_(local(weight.detach()), 1 - decay)


class Muon(torch.optim.Optimizer):
    """Muon for matrices that are replicated or sharded (FSDP2), the same ones on all ranks."""

    def __init__(
        self,
        matrices: Iterable[nn.Parameter],
        lr: float,
        *,
        weight_decay: float = 0.0,
        momentum: float = 0.95,
    ) -> None:
        super().__init__(matrices, {"lr": lr, "decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002 - torch's
        for group in self.param_groups:
            trained = [weight for weight in group["params"] if weight.grad is not None]
            updates = [full(self._nesterov(weight, group["momentum"])) for weight in trained]
            for weight, update in zip(trained, _orthogonalize_all(updates), strict=True):
                shard = local(weight)
                shard.mul_(1 - group["lr"] * group["decay"])
                alpha = -group["lr"] * ADAMW_RMS * max(weight.shape) ** 0.5
                shard.add_(_shard_like(update, weight), alpha=alpha)

    def _nesterov(self, weight: nn.Parameter, momentum: float) -> Tensor:
        """Update the momentum and return what it will be after the same gradient once more."""
        state, gradient = self.state[weight], weight.grad
        assert gradient is not None
        if not state:
            state["momentum"] = torch.zeros_like(weight)
        state["momentum"].lerp_(gradient, 1 - momentum)
        return gradient.lerp(state["momentum"], momentum)


def _orthogonalize_all(matrices: list[Tensor]) -> list[Tensor]:
    """Orthogonalize each matrix on one rank and broadcast it to the others."""
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if ranks == 1:
        return [orthogonalize(matrix) for matrix in matrices]
    for matrix in matrices[dist.get_rank() :: ranks]:
        matrix.copy_(orthogonalize(matrix))
    broadcasts = [dist.broadcast(matrix, i % ranks, async_op=True) for i, matrix in enumerate(matrices)]
    for work in broadcasts:
        if work is not None:  # None only where this rank is not in the group
            work.wait()
    return matrices


def orthogonalize(matrix: Tensor) -> Tensor:
    """Return about U V of U S V, by Newton-Schulz: singular values become 0.7 to 1.2."""
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    x = matrix / (matrix.norm() + 1e-7)
    x = x.T if len(x) > x.shape[1] else x
    for _ in range(NEWTON_SCHULZ_STEPS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if x.shape != matrix.shape else x


def _shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a tensor that all ranks hold, placed as `like`."""
    if not isinstance(like, DTensor):
        return tensor
    return local(distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None))
