"""Hosts: measure what the host of a GPU takes to start each kind of step, for `weft.core.topology.Host`.

Many small calls are started without waiting for the device, so that the device is never the slower one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.topology import Host
from weft.plan.choose import build
from weft.program.lower import lower
from weft.run.attention import attention
from weft.run.comm import Comm
from weft.run.exchange import broadcast_json
from weft.run.kernels import Accumulator, AttentionKernel
from weft.run.kernels.tiles import Tiles
from weft.run.measure.links import SMALL_BYTES, barrier, exchange
from weft.run.measure.stopwatch import launch_seconds
from weft.simulate.costs import host_seconds

ROWS, REPEATS = 64, 30


def measure_host(
    comm: Comm, device: torch.device, kernel: AttentionKernel, dtype: str, head_dim: int
) -> Host:
    """Return the costs of rank 0 on all ranks, which call this together."""
    tensors = torch.zeros(3, 1, 1, ROWS, head_dim, device=device, dtype=getattr(torch, dtype))
    q, k, v = tensors
    zeros = partial(torch.zeros, device=device)
    sums = Accumulator(zeros(1, 1, ROWS, head_dim), zeros(1, 1, ROWS))
    tiles = Tiles(None, ROWS, ROWS, ROWS, ROWS)
    seconds = partial(launch_seconds, device=device, repeats=REPEATS)
    with torch.no_grad():
        costs = Host(
            attend=seconds(partial(kernel.attend, q, k, v, tiles, head_dim**-0.5, sums)),
            copy=seconds(partial(q.copy_, k)),
        )
        if comm.size == 1:
            return _with(costs, call=seconds(partial(attention, q, k, v)) - costs.attend)
        costs = _with(costs, **_exchange_costs(comm, device))
        ring = partial(attention, q, k, v, tokens=ROWS * comm.size, plan="ring")
        barrier(comm)
        costs = _with(costs, call=seconds(ring) - _ring_seconds(comm, costs, dtype, head_dim))
        return Host(**broadcast_json(vars(costs)))


def _exchange_costs(comm: Comm, device: torch.device) -> dict[str, float]:
    """Return the costs of batches of messages, to one peer and to all, and of a collective."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    one = [comm.rank ^ 1] if comm.rank ^ 1 in others else []  # an odd last rank only takes part
    taken: list[float] = []
    for peers in (one, others):
        barrier(comm)
        taken.append(launch_seconds(exchange(comm, device, peers, SMALL_BYTES), device, REPEATS))
    message = max(0.0, taken[1] - taken[0]) / max(1, 2 * (comm.size - 2))
    costs = {"message": message, "post": taken[0] - 2 * message}
    if comm.collective(device):
        out, back = (torch.zeros(comm.size * SMALL_BYTES, dtype=torch.uint8, device=device) for _ in range(2))
        sends, receives = (list(enumerate(torch.split(x, SMALL_BYTES))) for x in (out, back))
        barrier(comm)
        costs["collective"] = launch_seconds(
            lambda: comm.all_to_all(sends, receives, "calibration").finish(), device, REPEATS
        )
    return costs


def _ring_seconds(comm: Comm, costs: Host, dtype: str, head_dim: int) -> float:
    """Return the cost of those steps of a ring that are measured by themselves."""
    layout = Layout.even(ROWS * comm.size, comm.size)
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": head_dim}
    problem = Problem(**sizes, q=layout, kv=layout, dtype=dtype)
    schedule = build("ring", problem, BlockMask.dense(1, layout.size))
    return host_seconds(lower(schedule, comm.rank), costs)


def _with(costs: Host, **seconds: float) -> Host:
    """Return the costs with more of them; negative differences are too small to measure, so 0."""
    return replace(costs, **{name: max(0.0, each) for name, each in seconds.items()})
