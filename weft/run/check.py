"""Check: is attention over N ranks the attention of one process? Forward, gradients, bytes and time.

What the ranks run is proved, too: no order of streams and messages can change the result.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.masks.random import random_mask
from weft.plan.choose import build
from weft.program.prove import prove_schedule
from weft.run.attention import attention
from weft.run.devices import device
from weft.run.kernels.reference import Reference
from weft.run.kernels.tiles import Tiles
from weft.run.pool import Pool
from weft.run.world import world_of

# Largest difference from float64, relative to the largest value: a few roundings of each dtype.
TOLERANCE = {"float64": 1e-10, "float32": 5e-6, "bfloat16": 2**-6, "float16": 2**-9}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One attention to check; tensors are drawn from the seed on every rank alike."""

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

    def mask(self) -> BlockMask:
        if self.density is None:
            return BlockMask.dense(self.heads, self.tokens)
        return random_mask(
            self.heads, self.tokens, self.tokens, block=self.block, density=self.density, seed=self.seed
        )

    def tensors(self) -> list[Tensor]:
        """q, k, v and the output's gradient, whole."""
        draw = torch.Generator().manual_seed(self.seed)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(1, h, self.tokens, self.head_dim) for h in heads]
        dtype = getattr(torch, self.dtype)
        return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How far from one process, how fast, how many bytes a rank sent in one forward, how much is proved."""

    plan: str
    output_error: float
    gradient_error: float
    seconds: float
    bytes_sent: int
    proved_steps: int
    """Steps of the programs of all ranks, forward and backward, over every transport."""
    tolerance: float

    @property
    def holds(self) -> bool:
        return max(self.output_error, self.gradient_error) <= self.tolerance


@dataclass(frozen=True)
class _Part:
    """What one rank brings back."""

    tensors: list[Tensor]
    """Output, dq, dk, dv of its shard."""
    seconds: float
    sent: int
    plan: str


def check(pool: Pool, trial: Trial) -> Outcome:
    """Run a trial on the pool's ranks and compare with one process in float64.

    Raises a ScheduleError that names the steps if programs of the schedule can race or deadlock.
    """
    layout = Layout.even(trial.tokens, pool.size, prefix=trial.prefix)
    proved_steps = prove_schedule(_schedule(trial, layout))
    parts: list[_Part] = pool.run(_run_rank, trial)
    errors: list[float] = []
    for index, expected in enumerate(reference(trial)):
        joined = torch.zeros_like(expected)
        for rank, part in enumerate(parts):
            rows = torch.from_numpy(layout.order(rank))
            shard = part.tensors[index].double()
            # Replicated tokens have the same output, but a partial gradient, on every rank.
            joined[:, :, rows] = shard if index == 0 else joined[:, :, rows] + shard
        errors.append(float((joined - expected).abs().max() / expected.abs().max().clamp(min=1.0)))
    return Outcome(
        plan=parts[0].plan,
        output_error=errors[0],
        gradient_error=max(errors[1:]),
        seconds=max(part.seconds for part in parts),
        bytes_sent=max(part.sent for part in parts),
        proved_steps=proved_steps,
        tolerance=TOLERANCE[trial.dtype],
    )


def _run_rank(trial: Trial) -> _Part:
    """On a rank: forwards for time and bytes, then one forward and backward for the result."""
    comm = world_of(None, 60.0).comm
    layout = Layout.even(trial.tokens, comm.size, prefix=trial.prefix)
    rows = torch.from_numpy(layout.order(comm.rank))
    place = device() if trial.device == "cuda" else torch.device("cpu")
    *inputs, grad = (x[:, :, rows].to(place) for x in trial.tensors())
    if comm.rank:
        # The loss counts replicated rows once, on rank 0.
        grad[:, :, : trial.prefix] = 0
    schedule = _schedule(trial, layout)
    seconds: list[float] = []
    sent = 0
    for _ in range(trial.rounds + 1):
        before, start = comm.bytes_sent, time.perf_counter()
        attention(*inputs, plan=schedule, backend=trial.backend)
        if place.type == "cuda":
            torch.cuda.synchronize(place)
        seconds.append(time.perf_counter() - start)
        sent = comm.bytes_sent - before
    leaves = [x.requires_grad_() for x in inputs]
    out = attention(*leaves, plan=schedule, backend=trial.backend)
    out.backward(grad)
    tensors = [out.detach(), *(x.grad for x in leaves if x.grad is not None)]
    return _Part([x.cpu() for x in tensors], statistics.median(seconds[1:]), sent, schedule.name)


def _schedule(trial: Trial, layout: Layout) -> Schedule:
    sizes = {"batch": 1, "heads": trial.heads, "kv_heads": trial.kv_heads, "head_dim": trial.head_dim}
    problem = Problem(**sizes, q=layout, kv=layout, dtype=trial.dtype)
    return build(trial.asked, problem, trial.mask())


@cache
def reference(trial: Trial) -> list[Tensor]:
    """Output, dq, dk, dv of one process in float64, a head at a time to stay small."""
    q, k, v, grad = (x.double() for x in trial.tensors())
    mask, share = trial.mask(), trial.heads // trial.kv_heads
    found = [torch.zeros_like(x) for x in (q, q, k, v)]
    for head in range(trial.heads):
        active = None if mask.is_dense else mask.patterns[mask.pattern_of[head]][None]
        tiles = Tiles(active, mask.block_q, mask.block_k, trial.tokens, trial.tokens)
        one = slice(head, head + 1), slice(head // share, head // share + 1)
        leaves = [x[:, i].clone().requires_grad_() for x, i in ((q, one[0]), (k, one[1]), (v, one[1]))]
        query, key, value = leaves
        out, _ = Reference().attend(query, key, value, tiles, trial.head_dim**-0.5)
        grads = torch.autograd.grad(out, leaves, grad[:, one[0]])
        for total, i, part in zip(found, (one[0], one[0], *one[1:] * 2), (out.detach(), *grads), strict=True):
            total[:, i] += part
    return found
