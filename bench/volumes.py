"""DSP's table: what a layer of an ST-DiT sends by how its sequence is sharded, and how long it takes."""

from __future__ import annotations

from typing import NamedTuple

from weft.core.topology import Topology
from weft.simulate.model_step import ITEM_BYTES
from weft.simulate.models import ModelSizes


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


def stages_seconds(model: ModelSizes, grid: tuple[int, int, int], topology: Topology, way: str) -> float:
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
