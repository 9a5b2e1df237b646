"""A rank of a test bed in a benchmark: its links, a timer in the place of compute, calls that take turns.

Machines are network namespaces with limited links. All of them share the cores of this machine, so ranks
that compute would wait for each other; ranks that sleep as long as they would compute do not.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.rows import Took, take_turns
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Link, Topology
from weft.plan.choose import build
from weft.run.exchange import broadcast_json
from weft.run.execute import Executor
from weft.run.kernels import Sums, choose
from weft.run.kernels.speeds import Speeds, TimingSizes
from weft.run.kernels.tiles import Tiles
from weft.run.measure.calibrate import Calibration
from weft.run.measure.stopwatch import device_seconds, lowest_eighth
from weft.run.world import world_of

DEVICES, HEADS, DIM = 2, 24, 64
TIMER, WIRE, COMPUTE = "timer", "wire", "compute"
HEAD_START = 0.03
CPU = torch.device("cpu")
IN_FLIGHT, CALLS = 32_000_000, 40


def problem_of(tokens: int, ranks: int, heads: int = HEADS) -> Problem:
    layout = Layout.even(tokens, ranks)
    return Problem(batch=1, heads=heads, kv_heads=heads, head_dim=DIM, q=layout, kv=layout)


def least_bytes(problem: Problem, machines: int) -> int:
    """What a machine has to send: queries, keys, values and outputs of the heads of others."""
    tensor = problem.q.size * problem.heads * DIM * problem.item_bytes
    return 4 * (machines - 1) * tensor // machines**2


def flops_for(rho: float, problem: Problem, bandwidth: float) -> float:
    """FLOP/s of a device with which a unit of compute is `rho` times as long as its message."""
    return 4 * problem.q.size * bandwidth / (problem.ranks * rho * problem.item_bytes)


def compute_seconds(problem: Problem, flops: float) -> float:
    return 4 * problem.q.size**2 * problem.heads * DIM / problem.ranks / flops


class Timer:
    """A kernel that sleeps as long as a device of so many FLOP/s would compute; its results are none.

    What a sleep was too long is taken off the next one: a device does not wait for a core to wake it.
    """

    name = TIMER

    def __init__(self) -> None:
        self.flops, self._over = 1e12, 0.0

    def attend(self, q: Tensor, k: Tensor, *rest: Any) -> Sums:
        began = time.perf_counter()
        seconds = 4 * q.numel() * k.shape[2] / self.flops
        time.sleep(max(0.0, seconds - self._over))
        self._over += time.perf_counter() - began - seconds
        _v, _tiles, _scale, into = (*rest, None)[:4]
        return into or (torch.zeros_like(q), torch.zeros(q.shape[:-1]))


_timer: Any = Timer()  # it has no backward
_calls: dict[str, Callable[[], object]] = {}


def go_first() -> None:
    """This rank's threads before all other processes: it sleeps and sends, so they lose next to nothing."""
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setscheduler(int(thread.name), os.SCHED_RR, os.sched_param(1))


def links(machines: int) -> Topology:
    """The bed as it is: its links, and what calls, posts and copies cost with all ranks at work."""
    calibration = Calibration(CPU, DIM, "float32", "auto", machines)
    steps = calibration.steps()
    for name in ("0→1", f"0→{DEVICES}", "network card", "copy", "post"):
        steps[name]()
    latency, card = calibration.links[0, DEVICES].latency, calibration.rates["nic_bandwidth"]
    return Topology(
        name="bed",
        machines=machines,
        devices=DEVICES,
        intra=calibration.links[0, 1],
        inter=Link(latency=latency, bandwidth=card),
        nic_bandwidth=card,
        call_seconds=broadcast_json(_call_seconds(latency)),
        memory_bandwidth=calibration.rates["memory_bandwidth"],
        post_seconds=calibration.times["post"],
        two_sided=True,
    )


def cores() -> int:
    return os.cpu_count() or 1


def kernel_flops() -> float:
    """FLOP/s of one core, while all are busy; 0 from ranks that let them be."""
    busy = dist.get_rank() < cores()
    return _kernel_flops() if busy else 0.0


def _kernel_flops() -> float:
    speeds = Speeds("auto", "float32", DIM, CPU, TimingSizes.of(CPU), None)
    return float(speeds.fields(speeds.dense_times() | speeds.sparse_times())["flops"])


def slowdown() -> float:
    """The share of its speed that a computing rank loses while messages pass between machines."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out, into = torch.zeros(2, IN_FLIGHT // 4)
    q, kernel = torch.randn(1, 4, 512, DIM), choose("auto")
    compute = partial(kernel.attend, q, q, q, Tiles(None, 64, 64, 512, 512), 1.0)
    lost: list[float] = []
    for _ in range(5):
        alone, beside = (_computing(compute, way) for way in ((), (out, into, (rank + DEVICES) % ranks)))
        lost.append(1 - alone / beside)
    return max(0.0, float(broadcast_json(torch.tensor(lost).median().item())))


def _computing(compute: Callable[[], object], way: tuple[Any, ...]) -> float:
    """Seconds of some calls on all ranks at once, beside a message each way if there is one."""
    dist.barrier()
    works: list[Any] = [dist.irecv(way[1], way[2]), dist.isend(way[0], way[2])] if way else []
    began = time.perf_counter()
    for _ in range(CALLS):
        compute()
    took = time.perf_counter() - began
    for work in works:
        work.wait()
    return took


def _call_seconds(latency: float) -> float:
    """What a hop of a ring takes besides its message and the timer itself."""
    comm = world_of(None, 120.0).comm
    problem = problem_of(comm.size, comm.size)
    _timer.flops = 1e12
    ring = Executor(build("ring", problem, BlockMask.dense(HEADS, comm.size)), comm, _timer)
    x = torch.zeros(1, HEADS, 1, DIM)
    seconds = lowest_eighth(device_seconds(lambda: ring.forward(x, x, x, 1.0, keep=False), CPU, 20))
    return max(0.0, seconds / comm.size - latency)


def prepare(schedules: Sequence[Schedule], kernel: str) -> None:
    """A call for each schedule, made twice, so that memory and connections are there."""
    _calls.clear()
    comm = world_of(None, 120.0).comm
    problem, _ = schedules[0].attention
    shards = [torch.randn(1, problem.heads, problem.q.rows(comm.rank), DIM) for _ in range(3)]
    chosen: Any = _timer if kernel == TIMER else choose(kernel)
    for schedule in schedules:
        executor = Executor(schedule, comm, chosen)
        _calls[schedule.name] = partial(executor.forward, *shards, DIM**-0.5, keep=False)
    machines = dist.get_world_size() // DEVICES
    _calls[WIRE] = _shift(least_bytes(problem, machines) // DEVICES)
    share = [torch.randn(1, problem.heads // comm.size, problem.q.size, DIM) for _ in range(3)]
    tiles = Tiles(None, 64, 64, problem.q.size, problem.q.size)
    _calls[COMPUTE] = partial(chosen.attend, *share, tiles, DIM**-0.5)
    for call in [*_calls.values()] * 2:
        dist.barrier()
        call()


def _shift(num_bytes: int) -> Callable[[], None]:
    """Every rank sends so much to the same device of the next machine."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    out, back = (torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))

    def call() -> None:
        coming = dist.irecv(back, (rank - DEVICES) % ranks)
        going = dist.isend(out, (rank + DEVICES) % ranks)
        assert coming is not None
        assert going is not None
        coming.wait()
        going.wait()

    return call


def play(plans: Sequence[str], flops: float, turn: int) -> dict[str, Took]:
    _timer.flops = flops
    with torch.no_grad():
        return take_turns({name: _calls[name] for name in plans}, turn, before=together)


def together() -> None:
    """Wait until all ranks can start at the same moment: they leave a barrier up to 20 ms apart here."""
    now = torch.tensor(time.monotonic(), dtype=torch.float64)
    dist.all_reduce(now, dist.ReduceOp.MAX)
    time.sleep(max(0.0, float(now) + HEAD_START - time.monotonic()))
