"""Check time and memory of one attention of Wan2.1-14B at 720p against predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import CommError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.diffusers.sampled_check import SampledCheck
from weft.doctor.check_strategies import RESERVED_SECONDS, least_left
from weft.doctor.kernel_speed import median_seconds
from weft.doctor.suite import Check, CheckContext
from weft.masks.grid import TokenGrid
from weft.masks.sta import sta_mask
from weft.plan.choose import build
from weft.program.workspace import memory_of
from weft.run.attention import attention
from weft.run.bind import Bound, RunFrame
from weft.run.exchange import all_gather_json
from weft.run.measure import trace
from weft.run.measure.compare import TIMEOUT
from weft.run.topology import topology_for
from weft.run.world import world_of
from weft.simulate.predict import predict

PLANS = ("auto", "ulysses")


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes of an attention; `block` tokens are a tile of the grid in its sparse one."""

    grid: TokenGrid
    heads: int
    head_dim: int
    block: int
    tile: tuple[int, int, int]

    def masks(self) -> dict[str, BlockMask]:
        sparse = sta_mask(self.heads, self.grid, block=self.block, tile=self.tile)
        return {"dense": BlockMask.dense(self.heads, self.grid.tokens), "sta": sparse}


WAN = AttentionSizes(TokenGrid(21, 45, 80), heads=40, head_dim=128, block=128, tile=(4, 4, 8))
REHEARSED = AttentionSizes(TokenGrid(4, 9, 10), heads=4, head_dim=16, block=16, tile=(2, 2, 4))


class _ProgramRecorder:
    """An observer that keeps the program that this rank runs."""

    bound: Bound

    def run(self, bound: Bound, frame: RunFrame) -> None:
        self.bound = bound
        bound.run(frame)


def checks(ctx: CheckContext) -> Iterator[Check]:
    shape = REHEARSED if ctx.is_rehearsal else WAN
    for kind, mask in shape.masks().items():
        for plan in PLANS:
            name = f"{kind} · {plan}"
            if least_left(ctx) < RESERVED_SECONDS:
                yield Check(name=name, status="skipped", note="It was not reached in time.")
            elif ctx.begins(name):
                yield _measured(name, plan, mask, shape, ctx)


def _measured(name: str, plan: str, mask: BlockMask, shape: AttentionSizes, ctx: CheckContext) -> Check:
    layout = Layout.even(shape.grid.tokens, ctx.ranks)
    sizes = {"batch": 1, "heads": shape.heads, "kv_heads": shape.heads, "head_dim": shape.head_dim}
    problem = Problem(**sizes, q=layout, kv=layout, dtype=ctx.dtype)
    topology = topology_for(None, ctx.ranks, ctx.device)
    schedule = build(plan, problem, mask, topology)
    qkv = _drawn((1, shape.heads, layout.rows(ctx.rank), shape.head_dim), ctx)
    out, peak, predicted = _memory(qkv, schedule)
    seconds = median_seconds(lambda: attention(*qkv, plan=schedule), ctx.device)
    # Of the slowest rank, and of the fullest.
    by_rank = all_gather_json((seconds, peak, predicted))
    seconds, peak, predicted = (max(each) for each in zip(*by_rank, strict=True))
    numbers = {
        "seconds": seconds,
        "predicted_seconds": predict(schedule, topology).seconds,
        "bytes": peak,
        "predicted_bytes": predicted,
    }
    note = "" if schedule.name == plan else f"plan {schedule.name}"
    proof = SampledCheck()
    try:
        _prove(proof, qkv, out + 0.5 * ctx.is_made_wrong, mask, layout)
    except CommError as error:  # sampled rows differ from float64, on all ranks alike
        return Check(name=name, status="wrong", note=str(error), numbers=numbers)
    numbers |= {"error": max(proof.errors.values()), "allowed": proof.allowed}
    return Check(name=name, status="measured", note=note, numbers=numbers)


def _prove(proof: SampledCheck, qkv: Sequence[Tensor], out: Tensor, mask: BlockMask, layout: Layout) -> None:
    """Compare sampled rows with float64, in as many heads as there are ranks: each may compute others."""
    # The tiles of a sliding window are the same for all heads.
    sparse = None if mask.is_dense else mask
    for head in range(0, mask.heads, max(1, mask.heads // layout.ranks)):
        q, k, v, actual = (x[:, head : head + 1] for x in (*qkv, out))
        proof.check(f"head {head}", (q, k, v), actual, None, sparse, layout, world_of(None, TIMEOUT))


def _drawn(shape: tuple[int, ...], ctx: CheckContext) -> list[Tensor]:
    """Return q, k, v, which differ by rank."""
    random = torch.Generator(ctx.device).manual_seed(ctx.rank)
    dtype = getattr(torch, ctx.dtype)
    return [torch.randn(shape, generator=random, device=ctx.device, dtype=dtype) for _ in range(3)]


def _memory(qkv: Sequence[Tensor], schedule: Schedule) -> tuple[Tensor, int, int]:
    """Return the output, and the bytes of an attention beside q, k and v: measured and predicted."""
    q, k, v = qkv
    device, world, programs = q.device, world_of(None, TIMEOUT), _ProgramRecorder()
    attention(q, k, v, plan=schedule)  # backends are tested in a first call, which takes memory too
    world.arena.clear()
    before = 0
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    with trace.observed_by(programs):
        out = attention(q, k, v, plan=schedule)
    memory = memory_of(programs.bound.program)
    predicted = memory.workspace + memory.results
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return out, torch.cuda.max_memory_allocated(device) - before, predicted
    # Messages in shared memory are not in the arena.
    return out, world.arena.num_bytes() + programs.bound.window.num_bytes + out.nbytes, predicted
