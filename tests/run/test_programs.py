"""What the executor promises of memory and of work that is not needed."""

from __future__ import annotations

import gc
from typing import Any
from weakref import ref

import pytest
import torch

import weft
from tests.run.dense import Truth
from tests.threads import ThreadComm, run_threads
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.plan.choose import build
from weft.program.workspace import assign
from weft.run.arena import Arena
from weft.run.execute import BACKWARD, FORWARD, SAVING, Executor
from weft.run.kernels import choose
from weft.run.world import world_of


def schedule(name: str, ranks: int = 3, dtype: str = "bfloat16") -> Schedule:
    tokens = Layout.even(29, ranks)
    problem = Problem(batch=2, heads=4, kv_heads=4, head_dim=8, q=tokens, kv=tokens, dtype=dtype)
    return build(name, problem, BlockMask.dense(4, 29))


def inputs(schedule: Schedule, rank: int) -> list[torch.Tensor]:
    problem, _ = schedule.attention
    shape = (problem.batch, problem.heads, problem.q.rows(rank), problem.head_dim)
    return [torch.randn(shape).to(getattr(torch, problem.dtype)) for _ in range(3)]


def test_inference_lowers_no_backward() -> None:
    ring = schedule("ring")

    def job(comm: ThreadComm) -> tuple[set[str], set[str]]:
        executor = Executor(ring, comm, choose("exact"))
        tensors = inputs(ring, comm.rank)
        executor.forward(*tensors, 0.3, keep=False)
        inference = {kind for kind, *_ in executor._programs}
        assert not executor._reversed
        out, saved = executor.forward(*tensors, 0.3, keep=True)
        executor.backward(out, tuple(tensors), out, saved, 0.3)  # type: ignore[arg-type]
        return inference, {kind for kind, *_ in executor._programs}

    assert run_threads(3, job) == [({FORWARD}, {FORWARD, SAVING, BACKWARD})] * 3


@pytest.mark.parametrize("name", ["ring", "ulysses", "usp:3x1"])
def test_no_float32_output_is_saved_for_a_16_bit_result(name: str) -> None:
    plan = schedule(name)

    def job(comm: ThreadComm) -> list[tuple[tuple[int, ...], torch.dtype]]:
        executor = Executor(plan, comm, choose("exact"))
        _, saved = executor.forward(*inputs(plan, comm.rank), 0.3, keep=True)
        return [(tuple(x.shape), x.dtype) for x in saved]

    for shapes in run_threads(3, job):
        wide = [shape for shape, dtype in shapes if dtype == torch.float32]
        assert all(shape[-1] == 1 for shape in wide), "only log-sum-exps are float32"
        assert len(wide) >= 1


@pytest.mark.parametrize("kernel", ["cpu", "exact", "reference"])
@pytest.mark.parametrize(("name", "merges"), [("ulysses", False), ("usp:3x1", False), ("ring", True)])
def test_only_outputs_that_are_merged_are_float32(name: str, merges: bool, kernel: str) -> None:  # noqa: FBT001
    plan = schedule(name)
    problem, mask = plan.attention
    truth = Truth.of(problem, mask)

    def job(comm: ThreadComm) -> tuple[torch.Tensor, set[str]]:
        executor = Executor(plan, comm, choose(kernel))
        out, _ = executor.forward(*truth.inputs(comm.rank), truth.scale, keep=False)
        program = executor.program(FORWARD, collective=comm.collective(out.device))
        assert out.dtype == torch.bfloat16
        return out, {root.dtype for root in program.roots if root.piece and root.name.startswith("out of")}

    outs, dtypes = zip(*run_threads(3, job), strict=True)
    assert set().union(*dtypes) == {"float32" if merges else "bfloat16"}
    assert truth.output_error(outs) < 0.02


def test_layers_of_one_world_share_one_block_as_large_as_the_largest() -> None:
    plans = [schedule(name) for name in ("ring", "ulysses", "gather")]

    def job(comm: ThreadComm) -> tuple[int, int]:
        arena, needs = Arena(), []
        executors = [Executor(plan, comm, choose("exact"), arena=arena) for plan in plans]
        for _ in range(2):
            for executor in executors:
                executor.forward(*inputs(executor.schedule, comm.rank), 0.3, keep=False)
                needs.append(assign(executor.program(FORWARD)).num_bytes)
        return arena.num_bytes(), max(needs)

    assert all(held == largest for held, largest in run_threads(3, job))


def test_an_executor_that_is_gone_holds_no_memory() -> None:
    plan = schedule("ring", ranks=1)

    def job(comm: ThreadComm) -> Any:
        executor = Executor(plan, comm, choose("exact"), arena=Arena())
        executor.forward(*inputs(plan, 0), 0.3, keep=True)
        return ref(executor), ref(executor.arena)

    ((executor, arena),) = run_threads(1, job)
    gc.collect()
    assert executor() is None
    assert arena() is None


def test_a_warm_call_is_one_look_up() -> None:
    q, k, v = (torch.randn(1, 2, 24, 8) for _ in range(3))
    tokens = Layout.permuted([list(range(23, -1, -1))])
    known = world_of(None, 60.0).executors
    before = len(known)
    first = weft.attention(q, k, v, tokens=tokens)
    hashed = tokens._hash
    assert len(known) == before + 1
    assert torch.equal(weft.attention(q, k, v, tokens=tokens), first)
    assert len(known) == before + 1
    assert tokens.__dict__["_hash"] is hashed, "a layout is hashed once"
