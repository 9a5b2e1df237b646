"""The hot path on a GPU that is none: no wait for the device, no copy to it, no operand made float32."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from bench.dry import Transport
from tests.run.hot_path import Seen, fake_cuda
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.masks.random import random_mask
from weft.plan.choose import build
from weft.run.execute import Executor
from weft.run.kernels import choose
from weft.run.kernels.rules import KernelSpec
from weft.run.switch import _Request
from weft.run.world import World
from weft.simulate.clusters import cluster

TOKENS, RANKS, DIM = 599, 4, 64
STRATEGIES = ("ring", "zigzag", "ulysses", "gather", "usp:2x2", "torus:2x2", "ring+balanced", "ulysses+cuts")
MASKS = ("dense", "blocks of 16", "blocks of 128")
GATHERED = "blocks of 40"
"""No block-sparse kernel takes them: rows are gathered."""
MIXED = "dense heads, blocks of 64"


def schedule(name: str, mask: str, *, heads: int = 8, kv_heads: int = 8) -> Schedule:
    layout = Layout.even(TOKENS, RANKS)
    problem = Problem(
        batch=2, heads=heads, kv_heads=kv_heads, head_dim=DIM, q=layout, kv=layout, dtype="bfloat16"
    )
    block = int(mask.split()[-1]) if mask != "dense" else 0
    dense = BlockMask.dense(heads, TOKENS)
    blocks = random_mask(heads, TOKENS, TOKENS, block=block, density=0.4) if block else dense
    if "dense heads" in mask:
        tiles = blocks.tiles.copy()
        tiles[1:3] = True
        blocks = BlockMask.from_tiles(tiles, q_len=TOKENS, kv_len=TOKENS, block_q=block)
    where = cluster("2x2xh100") if name.startswith("torus") else None
    return build(name, problem, blocks, where)


def warm_runs(plan: Schedule, rank: int, seen: Seen) -> None:
    """Run forward and backward until all is bound, and leave in `seen` what the last runs did."""
    problem, _ = plan.attention
    executor = Executor(
        plan, Transport(rank, RANKS, collective=True), choose("auto", "bfloat16", "cuda", KernelSpec.of(plan))
    )
    shapes = [(2, heads, problem.q.rows(rank), DIM) for heads in (problem.heads, *[problem.kv_heads] * 2)]
    q, k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in shapes)
    for _ in range(3):
        seen.clear()
        out, saved = executor.forward(q, k, v, 0.1, keep=True)
        given = out if executor.reads_output else None
        grads = executor.backward(torch.empty_like(out), (q, k, v), given, saved, 0.1)
        executor.forward(q, k, v, 0.1, keep=False)
    assert {x.dtype for x in (out, *grads)} == {torch.bfloat16}  # pyright: ignore[reportPossiblyUnboundVariable]
    assert seen.names


@pytest.mark.parametrize(
    ("name", "mask"),
    [*product(STRATEGIES, MASKS), ("ring", GATHERED), ("ulysses", GATHERED), ("usp:2x2", MIXED)],
)
def test_nothing_waits_and_nothing_is_widened(name: str, mask: str) -> None:
    with fake_cuda() as seen:
        warm_runs(schedule(name, mask), 1, seen)
        assert not seen.faults


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["ring", "usp:2x2"])
def test_grouped_heads_are_not_copied(name: str, mask: str) -> None:
    with fake_cuda() as seen:
        warm_runs(schedule(name, mask, heads=8, kv_heads=2), 1, seen)
        assert not seen.faults
        if mask == "dense":
            assert not seen.names["aten::index_select"], "keys and values are read as they lie"


@pytest.mark.parametrize("way", ["time → space", "space → time", "time →"])
def test_switches_wait_for_nothing(way: str) -> None:
    sizes = {"batch": 2, "time": 13, "space": 30, "channels": 24}
    source, _, target = way.partition(" →")
    shape = list(sizes.values())
    shape[list(sizes).index(source)] = len(range(*Layout.even(sizes[source], RANKS).shards[1][0]))
    with fake_cuda() as seen, torch.no_grad():
        world = World(Transport(1, RANKS, collective=True))
        x = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
        for _ in range(3):
            seen.clear()
            request = _Request(x, sizes, world, "test")
            there = request.redistribution(source, target.strip() or None)
            there.adjoint.run(there.run(x))  # and its gradient
        assert seen.names
        assert not seen.faults


@pytest.mark.parametrize("fault", ["reads", "copies", "mixed", "widened"])
def test_faults_are_seen(fault: str) -> None:
    with fake_cuda() as seen:
        x = torch.empty(4, 4, dtype=torch.bfloat16, device="cuda")
        seen.clear()
        if fault == "reads":
            x.sum().item()
        elif fault == "copies":
            x.copy_(torch.zeros(4, 4))
        elif fault == "mixed":
            with pytest.raises(RuntimeError, match="same device"):
                x.index_select(0, torch.zeros(2, dtype=torch.int64))
        else:
            x.float()
        assert list(seen.faults) == [fault]
