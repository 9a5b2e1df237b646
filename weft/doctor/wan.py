"""Wan: an attention of the size that Wan2.1-14B has at 720p, its time and memory beside predictions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.errors import CommError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.doctor.kernel_speed import median_seconds
from weft.doctor.part import Check, Site
from weft.doctor.strategies import RESERVED_SECONDS, least_left
from weft.masks.grid import TokenGrid
from weft.masks.sta import sta_mask
from weft.models.prove import Proof
from weft.plan.choose import build
from weft.program.workspace import memory_of
from weft.run import trace
from weft.run.attention import attention
from weft.run.bind import Bound, Frame
from weft.run.check import TIMEOUT
from weft.run.exchange import all_gather_json
from weft.run.gpus import topology_for
from weft.run.world import world_of
from weft.simulate.predict import predict

PLANS = ("auto", "ulysses")


@dataclass(frozen=True)
class Shape:
    """Sizes of an attention; `block` tokens are a tile of the grid in its sparse one."""

    grid: TokenGrid
    heads: int
    head_dim: int
    block: int
    tile: tuple[int, int, int]

    def masks(self) -> dict[str, BlockMask]:
        sparse = sta_mask(self.heads, self.grid, block=self.block, tile=self.tile)
        return {"dense": BlockMask.dense(self.heads, self.grid.tokens), "sta": sparse}


WAN = Shape(TokenGrid(21, 45, 80), heads=40, head_dim=128, block=128, tile=(4, 4, 8))
REHEARSED = Shape(TokenGrid(4, 9, 10), heads=4, head_dim=16, block=16, tile=(2, 2, 4))


class _Programs:
    """A watch that sees which program of this rank runs."""

    bound: Bound

    def run(self, bound: Bound, frame: Frame) -> None:
        self.bound = bound
        bound.run(frame)


def checks(site: Site) -> Iterator[Check]:
    shape = REHEARSED if site.is_rehearsal else WAN
    for kind, mask in shape.masks().items():
        for plan in PLANS:
            name = f"{kind} · {plan}"
            if least_left(site) < RESERVED_SECONDS:
                yield Check(name=name, status="skipped", note="It was not reached in time.")
            elif site.begins(name):
                yield _measured(name, plan, mask, shape, site)


def _measured(name: str, plan: str, mask: BlockMask, shape: Shape, site: Site) -> Check:
    layout = Layout.even(shape.grid.tokens, site.ranks)
    sizes = {"batch": 1, "heads": shape.heads, "kv_heads": shape.heads, "head_dim": shape.head_dim}
    problem = Problem(**sizes, q=layout, kv=layout, dtype=site.dtype)
    topology = topology_for(None, site.ranks, site.device)
    schedule = build(plan, problem, mask, topology)
    q, k, v = _drawn((1, shape.heads, layout.rows(site.rank), shape.head_dim), site)
    out, held, predicted = _held(q, k, v, schedule)
    seconds = median_seconds(lambda: attention(q, k, v, plan=schedule), site.device)
    # Of the slowest rank, and of the fullest.
    every = all_gather_json((seconds, held, predicted))
    seconds, held, predicted = (max(each) for each in zip(*every, strict=True))
    numbers = {
        "seconds": seconds,
        "predicted_seconds": predict(schedule, topology).seconds,
        "bytes": held,
        "predicted_bytes": predicted,
    }
    note = "" if schedule.name == plan else f"plan {schedule.name}"
    proof = Proof()
    try:
        _prove(proof, (q, k, v), out + 0.5 * site.is_made_wrong, mask, layout)
    except CommError as error:  # sampled rows that are not those of float64, on all ranks alike
        return Check(name=name, status="wrong", note=str(error), numbers=numbers)
    numbers |= {"error": max(proof.errors.values()), "allowed": proof.allowed}
    return Check(name=name, status="measured", note=note, numbers=numbers)


def _prove(
    proof: Proof, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, mask: BlockMask, layout: Layout
) -> None:
    """Compare sampled rows with float64, of as many heads as there are ranks: each may compute others."""
    heads = mask.heads
    some = range(0, heads, max(1, heads // layout.ranks))
    # The tiles of a sliding window are the same for all heads.
    sparse = None if mask.is_dense else mask
    for head in some:
        q, k, v, found = (x[:, head : head + 1] for x in (*qkv, out))
        proof.check(f"head {head}", (q, k, v), found, None, sparse, layout, world_of(None, TIMEOUT))


def _drawn(shape: tuple[int, ...], site: Site) -> list[Tensor]:
    """Return q, k, v, which differ by rank."""
    random = torch.Generator(site.device).manual_seed(site.rank)
    how = {"generator": random, "device": site.device, "dtype": getattr(torch, site.dtype)}
    return [torch.randn(shape, **how) for _ in range(3)]


def _held(q: Tensor, k: Tensor, v: Tensor, schedule: Schedule) -> tuple[Tensor, int, int]:
    """Return the output, and the bytes that an attention holds beside q, k and v: found and predicted."""
    device, world, programs = q.device, world_of(None, TIMEOUT), _Programs()
    attention(q, k, v, plan=schedule)  # backends are tested in a first call, which takes memory too
    world.arena.clear()
    before = _allocated(device)
    with trace.watched_by(programs):
        out = attention(q, k, v, plan=schedule)
    memory = memory_of(programs.bound.program)
    predicted = memory.workspace + memory.results
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return out, torch.cuda.max_memory_allocated(device) - before, predicted
    # Messages in shared memory are not in the arena.
    return out, world.arena.num_bytes() + programs.bound.window.num_bytes + out.nbytes, predicted


def _allocated(device: torch.device) -> int:
    """Return the bytes that tensors on a GPU take now, from which on the most is noted."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)
