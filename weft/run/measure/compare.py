"""Compare attention over N ranks with that of one process in float64: output, gradients, bytes and time.

The programs are also proved: no order of streams and messages can change the result.

    check(pool, trial)    # with ranks of this machine
    compare(trial)        # on every rank, under torchrun: all return the same TrialResult
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.masks.random import random_mask
from weft.plan.choose import build, usp_names
from weft.plan.strategies import short_names
from weft.program.prove import prove_schedule
from weft.run import streams
from weft.run.attention import attention
from weft.run.devices import device
from weft.run.exchange import all_gather_json, broadcast_json, host_device
from weft.run.kernels.reference import ReferenceKernel
from weft.run.kernels.tiles import Tiles
from weft.run.world import world_of

TOLERANCE = {"float64": 1e-10, "float32": 5e-6, "bfloat16": 2**-6, "float16": 2**-9}
"""Largest difference from float64, relative to the largest value: a few roundings of each dtype."""
TIMEOUT = 60.0
"""That of `attention`, so that it is the same world."""
BALANCED = ("ulysses+balanced", "ring+balanced", "gather+cuts")


def plan_names(ranks: int) -> list[str]:
    """Return the plans to check on `ranks` ranks of one machine: every strategy, and some balanced."""
    return ["auto", *short_names(), *usp_names(ranks)[1:-1], *BALANCED]


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One attention to check; every rank draws the same tensors from the seed."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    asked: str = "auto"
    """The plan, by name."""
    dtype: str = "float32"
    density: float | None = None
    """Share of active tiles of a random mask; None is dense."""
    block: int = 64
    prefix: int = 0
    rounds: int = 1
    seed: int = 0
    backend: str = "auto"
    device: str = "cpu"
    """cuda: each rank computes on its GPU; the reference is computed on the CPU."""
    machines: int = 1
    """Number that the plan is made for, such as torus; the ranks may be anywhere."""

    def mask(self) -> BlockMask:
        if self.density is None:
            return BlockMask.dense(self.heads, self.tokens)
        return random_mask(
            self.heads, self.tokens, self.tokens, block=self.block, density=self.density, seed=self.seed
        )

    def tensors(self) -> list[Tensor]:
        """Return q, k, v and the output's gradient of the full sequence."""
        draw = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(1, h, self.tokens, self.head_dim) for h in heads]
        dtype = getattr(torch, self.dtype)
        return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """Errors against one process, time and bytes of a forward, and the number of proved steps."""

    plan: str
    output_error: float
    gradient_error: float
    seconds: float
    bytes_sent: int
    tolerance: float
    proved_steps: int = 0
    """Of the programs of all ranks, forward and backward, over every transport."""

    @property
    def holds(self) -> bool:
        return max(self.output_error, self.gradient_error) <= self.tolerance


class JoinedResult(NamedTuple):
    """The result of all ranks, the same on each."""

    tensors: list[Tensor]
    """Output, dq, dk, dv of the full sequence, in float64 on the CPU."""
    plan: str
    seconds: float
    """Of the slowest rank."""
    bytes_sent: int
    """By the rank that sent most."""


class RankRunner(Protocol):
    """A Pool, or the world of a launcher whose ranks all call `check`."""

    size: int

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]: ...


def check(ranks: RankRunner, trial: Trial) -> TrialResult:
    """Run a trial on some ranks and compare with one process in float64.

    Raise a ScheduleError that names the steps if programs of the schedule can race or deadlock.
    """
    proved_steps = prove(trial, ranks.size)  # before a rank runs them
    outcome: TrialResult = ranks.run(compare, trial)[0]
    return replace(outcome, proved_steps=proved_steps)


def prove(trial: Trial, ranks: int) -> int:
    """Prove the trial's programs, forward and backward; return their number of steps."""
    return prove_schedule(_schedule(trial, Layout.even(trial.tokens, ranks, prefix=trial.prefix)))


def compare(trial: Trial) -> TrialResult:
    """On every rank: run a trial; rank 0 compares with float64, and all return its TrialResult."""
    joined, errors = run(trial), [0.0]
    if world_of(None, TIMEOUT).comm.rank == 0:
        errors = [error(*pair) for pair in zip(joined.tensors, reference(trial), strict=True)]
    output_error, *gradient_errors = broadcast_json([str(each) for each in errors])  # JSON has no infinity
    return TrialResult(
        plan=joined.plan,
        output_error=float(output_error),
        gradient_error=max(map(float, gradient_errors)),
        seconds=joined.seconds,
        bytes_sent=joined.bytes_sent,
        tolerance=TOLERANCE[trial.dtype],
    )


def error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference relative to the largest expected value; NaN counts as infinite."""
    difference = (actual - expected).abs().max() / expected.abs().max().clamp(min=1.0)
    return float(difference.nan_to_num(torch.inf))


def run(trial: Trial) -> JoinedResult:
    """On every rank: forwards for time and bytes, then one forward and backward for the result."""
    comm = world_of(None, TIMEOUT).comm
    layout = Layout.even(trial.tokens, comm.size, prefix=trial.prefix)
    rows = torch.as_tensor(layout.order(comm.rank))
    target = device() if trial.device == "cuda" else torch.device("cpu")
    *inputs, grad = (x[:, :, rows].to(target) for x in trial.tensors())
    if comm.rank:
        # The loss counts replicated rows once, on rank 0.
        grad[:, :, : trial.prefix] = 0
    schedule = _schedule(trial, layout)
    seconds: list[float] = []
    sent = 0
    for _ in range(trial.rounds + 1):
        before, start = comm.bytes_sent, time.perf_counter()
        attention(*inputs, plan=schedule, backend=trial.backend)
        streams.record(target).synchronize()
        seconds.append(time.perf_counter() - start)
        sent = comm.bytes_sent - before
    leaves = [x.requires_grad_() for x in inputs]
    out = attention(*leaves, plan=schedule, backend=trial.backend)
    shards = [out.detach(), *torch.autograd.grad(out, leaves, grad)]
    shards = [shard.double().cpu() for shard in shards]
    # Replicated tokens have the same output, but a partial gradient, on every rank; an output that is wrong
    # on any of them shows in the mean.
    shards[0][:, :, : trial.prefix] /= comm.size
    tensors = [_joined(shard, rows, trial.tokens) for shard in shards]
    own = statistics.median(seconds[1:]), sent
    slowest, most = (max(each) for each in zip(*all_gather_json(own), strict=True))
    return JoinedResult(tensors, schedule.name, slowest, most)


def _joined(shard: Tensor, rows: Tensor, tokens: int) -> Tensor:
    """Return the sum over ranks of shards at their rows of the full sequence."""
    full = torch.zeros(*shard.shape[:2], tokens, shard.shape[-1], dtype=torch.float64)
    full[:, :, rows] = shard
    if dist.is_initialized():
        group = dist.group.WORLD
        assert group is not None
        full = full.to(host_device(group))
        dist.all_reduce(full)  # pyright: ignore[reportUnknownMemberType]
    return full.cpu()


def _schedule(trial: Trial, layout: Layout) -> Schedule:
    sizes = {"batch": 1, "heads": trial.heads, "kv_heads": trial.kv_heads, "head_dim": trial.head_dim}
    problem = Problem(**sizes, q=layout, kv=layout, dtype=trial.dtype)
    topology = Topology(machines=trial.machines, devices=layout.ranks // trial.machines)
    return build(trial.asked, problem, trial.mask(), topology)


def reference(trial: Trial) -> list[Tensor]:
    """Return output, dq, dk, dv of one process in float64, cached for all ways to run the same attention."""
    plain = {"asked": "auto", "backend": "auto", "device": "cpu", "machines": 1, "prefix": 0, "rounds": 1}
    return _reference(replace(trial, **plain))


@cache
def _reference(trial: Trial) -> list[Tensor]:
    """Compute one head at a time, to bound memory."""
    q, k, v, grad = (x.double() for x in trial.tensors())
    mask, share = trial.mask(), trial.heads // trial.kv_heads
    totals = [torch.zeros_like(x) for x in (q, q, k, v)]
    for head in range(trial.heads):
        active = None if mask.is_dense else mask.patterns[mask.pattern_of[head]][None]
        tiles = Tiles(active, mask.block_q, mask.block_k, trial.tokens, trial.tokens)
        own, shared = slice(head, head + 1), slice(head // share, head // share + 1)
        heads = (own, shared, shared)
        leaves = [x[:, i].clone().requires_grad_() for x, i in zip((q, k, v), heads, strict=True)]
        query, key, value = leaves
        out, _ = ReferenceKernel().attend(query, key, value, tiles, trial.head_dim**-0.5)
        grads = torch.autograd.grad(out, leaves, grad[:, own])
        for total, i, x in zip(totals, (own, *heads), (out.detach(), *grads), strict=True):
            total[:, i] += x
    return totals
