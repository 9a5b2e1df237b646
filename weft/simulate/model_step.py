"""Model step: the time of a denoising step of a model, from its sizes and its simulated attention.

Each layer is its attention, linear layers at a given speed, cross-attention to text, and elementwise
operations, which are bound by memory. VAE, text encoder, patch embedding and the sampler are left out, and
so is every collective but those of attention: weights are replicated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.core.topology import Topology
from weft.simulate.models import ModelSizes

ITEM_BYTES = 2  # bfloat16
# Activations that eager PyTorch reads and writes around an attention and around an MLP, assumed: norm 2,
# modulation 4, gate and residual 5; of q and k, norm 4 and rotation 4; around a cross-attention 5.
AROUND_ATTENTION, AROUND_MLP, AROUND_CROSS = 19, 11, 5


@dataclass(frozen=True)
class ModelStep:
    """Seconds of one pass through a model on its slowest rank."""

    attention: float
    linear: float
    cross: float
    elementwise: float

    @property
    def seconds(self) -> float:
        return self.attention + self.linear + self.cross + self.elementwise


def step(
    model: ModelSizes,
    grid: tuple[int, int, int],
    attention_seconds: float,
    topology: Topology,
    *,
    linear_flops: float = 0.0,
) -> ModelStep:
    """Return the seconds of one pass; a denoising step with guidance is two.

    `attention_seconds` is one layer's attention with its communication, as simulated. Linear layers run at
    `linear_flops`, by default as fast as dense attention. Text in the same attention is replicated, so every
    rank computes all of it.
    """
    rows = -(-math.prod(grid) // topology.ranks)
    tokens, hidden = rows + model.text, model.hidden
    multiplied = model.weights * tokens + 2 * hidden**2 * model.cross
    passes = (
        AROUND_ATTENTION * model.attentions
        + (AROUND_MLP + 2 * model.mlp) * model.mlps
        + AROUND_CROSS * (model.cross > 0)
    )
    moved = passes * tokens * hidden * ITEM_BYTES
    return ModelStep(
        model.layers * attention_seconds,
        model.layers * 2 * multiplied / (linear_flops or topology.flops),
        model.layers * 4 * rows * model.cross * hidden / topology.flops,
        model.layers * moved / topology.memory_bandwidth if topology.memory_bandwidth else 0.0,
    )
