"""Replay: measure the attentions of all ranks, one rank after another, and simulate a cluster with them.

Each rank's compiled program runs on this machine without peers: received messages are noise. The durations of
its attentions replace those of a topology in the simulator. This times 8 ranks on 2 cores realistically, as
far as this machine computes like one device of the cluster.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.timeline import Timeline
from weft.core.topology import Topology
from weft.program.steps import Attention
from weft.run.arena import Arena
from weft.run.bind import Bound, RunFrame
from weft.run.comm import Message
from weft.run.execute import Executor
from weft.run.kernels import choose
from weft.run.measure.clocks import HostClock, run_marked
from weft.run.measure.trace import observed_by
from weft.simulate.events import simulate


def replay(schedule: Schedule, topology: Topology, kernel: str = "auto", repeats: int = 3) -> Timeline:
    """Return the simulated timeline of a forward schedule with attentions as long as they take here."""
    seconds = measure_attends(schedule, kernel, repeats)
    timeline = simulate(schedule, topology, seconds=seconds)
    return replace(timeline, name=f"{schedule.name}, attentions as measured")


def measure_attends(schedule: Schedule, kernel: str = "auto", repeats: int = 3) -> dict[int, float]:
    """Return the seconds of every Attend, by operation: the median of `repeats` runs after a warm-up.

    It uses as many threads as torch does in this process.
    """
    if schedule.backward:
        raise InputError("This is a backward schedule.", hint="Replay the forward one.")
    if repeats < 1:
        raise InputError(f"repeats must be > 0, got {repeats}.")
    problem, _ = schedule.attention
    taken: dict[int, list[float]] = defaultdict(list)
    stopwatch = _Stopwatch(taken)
    arena = Arena()
    for rank in range(problem.ranks):
        comm = _NoiseComm(rank, problem.ranks, getattr(torch, problem.dtype))
        executor = Executor(schedule, comm, choose(kernel, problem.dtype), arena=arena)
        shards = _shards(problem, rank)
        with observed_by(stopwatch):
            for _ in range(repeats + 1):
                executor.forward(*shards, problem.head_dim**-0.5, keep=False)
    return {op: median(times[1:]) for op, times in taken.items()}


def _shards(problem: Problem, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    dtype = getattr(torch, problem.dtype)
    sizes = ((problem.heads, problem.q), (problem.kv_heads, problem.kv), (problem.kv_heads, problem.kv))
    q, k, v = (
        torch.randn(problem.batch, heads, layout.rows(rank), problem.head_dim).to(dtype)
        for heads, layout in sizes
    )
    return q, k, v


class _Stopwatch:
    """An observer that records how long attentions take."""

    def __init__(self, taken: dict[int, list[float]]) -> None:
        self.taken = taken

    def run(self, bound: Bound, frame: RunFrame) -> None:
        marks: list[int] = []
        run_marked(bound, frame, HostClock(), marks)
        for step, start, end in zip(bound.program.steps, marks, marks[1:], strict=False):
            if isinstance(step, Attention):
                self.taken[step.op].append((end - start) / 1e9)


class _NoiseComm:
    """A transport whose messages have all arrived: noise, as kernels are faster on zeros."""

    transport = "none"

    def __init__(self, rank: int, size: int, dtype: torch.dtype) -> None:
        self.rank, self.size, self.bytes_sent = rank, size, 0
        self.noise = torch.empty(0, dtype=dtype)

    def begin(self, device: torch.device) -> None:
        """Messages may lie anywhere."""

    def post(self, sends: list[Message], receives: list[Message], label: str, tag: int) -> _NoiseComm:
        del sends, label, tag
        for _, buffer in receives:
            numbers = buffer.view(self.noise.dtype)
            if self.noise.numel() < numbers.numel():
                self.noise = torch.randn(numbers.numel()).to(self.noise.dtype)
            numbers.copy_(self.noise[: numbers.numel()])
        return self

    def wait_for(self, peer: int) -> None:
        pass

    def wait_sent(self, peer: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def warm_up(self, device: torch.device) -> None:
        """Nothing has to be connected."""

    def collective(self, device: torch.device) -> bool:
        del device
        return False

    def all_to_all(self, sends: list[Message], receives: list[Message], label: str) -> _NoiseComm:
        return self.post(sends, receives, label, 0)

    def all_gather_ints(self, numbers: list[int]) -> list[list[int]]:
        return [numbers for _ in range(self.size)]
