"""A whole model's time: what surrounds its attention, from sizes alone.

A denoising step is, for every layer, the attention that was simulated, linear layers at a stated speed,
cross-attention to text, and what reads and writes activations without computing much. VAE, text encoder,
patch embedding and the sampler are left out, and so is every collective but those of attention: weights are
replicated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from weft.core.topology import Topology
from weft.simulate.models import Model

ITEM_BYTES = 2  # bfloat16
# Activations that eager PyTorch reads and writes around an attention and around an MLP [I]: norm 2,
# modulation 4, gate and residual 5; of q and k, norm 4 and rotation 4; around a cross-attention 5.
AROUND_ATTENTION, AROUND_MLP, AROUND_CROSS = 19, 11, 5


@dataclass(frozen=True)
class Step:
    """Seconds of one pass through the model on its slowest rank."""

    attention: float
    linear: float
    cross: float
    elementwise: float

    @property
    def seconds(self) -> float:
        return self.attention + self.linear + self.cross + self.elementwise


def step(
    model: Model,
    grid: tuple[int, int, int],
    attention_seconds: float,
    topology: Topology,
    *,
    linear_flops: float = 0.0,
) -> Step:
    """One pass. `attention_seconds` is one layer's attention with its communication, as simulated.

    Linear layers run at `linear_flops`; left out, as fast as attention: 61 % of the peak on the clusters
    that have names. Text in the same attention is replicated, so every rank computes all of it.
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
    return Step(
        model.layers * attention_seconds,
        model.layers * 2 * multiplied / (linear_flops or topology.flops),
        model.layers * 4 * rows * model.cross * hidden / topology.flops,
        model.layers * moved / topology.memory_bandwidth if topology.memory_bandwidth else 0.0,
    )


def step_seconds(
    model: Model,
    grid: tuple[int, int, int],
    attention_seconds: float,
    topology: Topology,
    *,
    linear_flops: float = 0.0,
) -> float:
    """Seconds of one pass, for a table that has attention's already.

    `step_seconds(model, grid, simulate(schedule, topology).seconds, topology)`; a denoising step with
    guidance is two passes.
    """
    return step(model, grid, attention_seconds, topology, linear_flops=linear_flops).seconds


class Volumes(NamedTuple):
    """Bytes that a rank sends for one layer of an ST-DiT, forward, by the way its sequence is sharded."""

    megatron: float
    ring: float
    ulysses: float
    dsp: float


def volumes(activation: float, ranks: int) -> Volumes:
    """DSP's table, 8M, 2M, 4M/N and 2M/N, less the part that stays at home, for an activation of M bytes.

    >>> volumes(1024, 4)
    Volumes(megatron=6144.0, ring=1536.0, ulysses=768.0, dsp=384.0)
    """
    away = activation * (ranks - 1) / ranks
    return Volumes(8 * away, 2 * away, 4 * away / ranks, 2 * away / ranks)


COLLECTIVES = Volumes(8, 1, 4, 2)


def stages_seconds(model: Model, grid: tuple[int, int, int], topology: Topology, way: str) -> float:
    """Both attentions of a layer of an ST-DiT and what they exchange, by a field of `Volumes`.

    Attention within frames has frames to share out, attention along time has places (or heads, for Ulysses
    and Megatron). Nothing is overlapped.
    """
    (frames, height, width), ranks = grid, topology.ranks
    places = height * width
    busiest = -(-frames // ranks) * places**2 * model.hidden
    if way in ("ulysses", "megatron"):
        busiest += -(-model.heads // ranks) * model.head_dim * places * frames**2
    elif way == "ring":
        busiest += -(-frames // ranks) * frames * places * model.hidden
    else:
        busiest += -(-places // ranks) * frames**2 * model.hidden
    computing = 2 * topology.call_seconds + 4 * busiest / topology.flops
    if ranks == 1:
        return computing
    sent = getattr(volumes(frames * places * model.hidden * ITEM_BYTES, ranks), way)
    return computing + exchange_seconds(topology, sent, int(getattr(COLLECTIVES, way)))


def exchange_seconds(topology: Topology, sent: float, collectives: int) -> float:
    """All-to-alls in which a rank sends so much in all, packed before and unpacked after."""
    ranks, near = topology.ranks, topology.devices - 1
    if ranks == 1:
        return 0.0
    times = [sent * near / (ranks - 1) / topology.intra.bandwidth]
    latency = topology.intra.latency
    if topology.machines > 1:
        rate = topology.inter.bandwidth
        if topology.nic_bandwidth:
            rate = min(rate, topology.nic_bandwidth / topology.devices)
        times.append(sent * (ranks - 1 - near) / (ranks - 1) / rate)
        latency = topology.inter.latency
    copies = 4 * sent / topology.memory_bandwidth if topology.memory_bandwidth else 0.0
    return collectives * latency + max(times) + copies
