"""Hosts: what starting each kind of step costs the host of a GPU, as `weft.core.topology.Host` has it.

Many calls are started without waiting for the device; what they compute is small, so that the device is never
the slower one.
"""

from __future__ import annotations

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
from weft.run.kernels import Kernel
from weft.run.kernels.tiles import Tiles
from weft.run.links import SMALL, exchange, meet
from weft.run.stopwatch import launch_seconds
from weft.simulate.costs import host_seconds

ROWS, REPEATS = 64, 30


def measure_host(comm: Comm, device: torch.device, kernel: Kernel, dtype: str, head_dim: int) -> Host:
    """Return the costs of rank 0, on all ranks, which call it together."""
    tensors = torch.zeros(3, 1, 1, ROWS, head_dim, device=device, dtype=getattr(torch, dtype))
    q, k, v = tensors
    sums = torch.zeros(1, 1, ROWS, head_dim, device=device), torch.zeros(1, 1, ROWS, device=device)
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
        meet(comm)
        costs = _with(costs, call=seconds(ring) - _ring_seconds(comm, costs, dtype, head_dim))
        return Host(**broadcast_json(vars(costs)))


def _exchange_costs(comm: Comm, device: torch.device) -> dict[str, float]:
    """Return the costs of batches of messages, to one peer and to all, and of a collective."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    one = [comm.rank ^ 1] if comm.rank ^ 1 in others else []  # an odd last rank only takes part
    taken: list[float] = []
    for peers in (one, others):
        meet(comm)
        taken.append(launch_seconds(exchange(comm, device, peers, SMALL), device, REPEATS))
    message = max(0.0, taken[1] - taken[0]) / max(1, 2 * (comm.size - 2))
    costs = {"message": message, "post": taken[0] - 2 * message}
    if comm.collective(device):
        out, back = (torch.zeros(comm.size * SMALL, dtype=torch.uint8, device=device) for _ in range(2))
        sends, receives = (list(enumerate(x.split(SMALL))) for x in (out, back))
        meet(comm)
        costs["collective"] = launch_seconds(
            lambda: comm.all_to_all(sends, receives, "calibration").finish(), device, REPEATS
        )
    return costs


def _ring_seconds(comm: Comm, costs: Host, dtype: str, head_dim: int) -> float:
    """Return what the steps of a ring cost that are measured by themselves."""
    layout = Layout.even(ROWS * comm.size, comm.size)
    sizes = {"batch": 1, "heads": 1, "kv_heads": 1, "head_dim": head_dim}
    problem = Problem(**sizes, q=layout, kv=layout, dtype=dtype)
    schedule = build("ring", problem, BlockMask.dense(1, layout.size))
    return host_seconds(lower(schedule, comm.rank), costs)


def _with(costs: Host, **seconds: float) -> Host:
    """Return the costs with some more; differences below what can be measured are 0."""
    return Host(**{**vars(costs), **{name: max(0.0, each) for name, each in seconds.items()}})
