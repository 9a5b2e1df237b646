"""Streams: what a device without them says, and memory that CUDA graphs keep, with a stand-in for streams."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.run.dense import Truth
from tests.threads import run_threads
from weft.core.errors import CommError, InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.plan.choose import build
from weft.run import streams
from weft.run.arena import Arena
from weft.run.bind import Bound
from weft.run.execute import CAPTURED, FORWARD, Executor
from weft.run.kernels import choose
from weft.run.opaque import call_backward_op, call_op

CPU = torch.device("cpu")


class FakeStreams:
    """The current stream of each thread, as a test sets it."""

    def __init__(self) -> None:
        self.number, self.capturing = 1, False

    def current(self, _: torch.device) -> int:
        return self.number

    def is_capturing(self, _: torch.device) -> bool:
        return self.capturing


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    stand_in = FakeStreams()
    monkeypatch.setattr(streams, "current", stand_in.current)
    monkeypatch.setattr(streams, "is_capturing", stand_in.is_capturing)
    return stand_in


@pytest.fixture(autouse=True)
def graphs_end(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test captures does not stay for the next."""
    monkeypatch.setattr("weft.run.arena._of_graphs", [])
    yield


def attention(comm: Any, tokens: int, arena: Arena) -> tuple[Executor, Truth]:
    layout = Layout.even(tokens, 2)
    problem = Problem(batch=1, heads=2, kv_heads=2, head_dim=4, q=layout, kv=layout, dtype="float64")
    schedule = build("ring", problem, BlockMask.dense(2, tokens))
    return Executor(schedule, comm, choose("exact"), arena=arena, name=str(tokens)), Truth.of(problem)


def call(executor: Executor, truth: Truth) -> Tensor:
    return executor.forward(*truth.inputs(executor.comm.rank), truth.scale, keep=False)[0]


def addresses(bound: Bound) -> set[int]:
    return {plane.data_ptr() for planes in bound.fixed.values() for plane in planes}


def block_of(bound: Bound) -> int:
    """Where the memory lies that a program views."""
    return next(iter(bound.fixed.values()))[0].untyped_storage().data_ptr()


def graph(executor: Executor) -> Bound:
    return executor._bound[FORWARD, None, CAPTURED]


def test_a_device_without_streams_does_everything_at_once() -> None:
    fake_gpu = torch.device("cuda", 0)  # of a fake tensor: this process has not touched a GPU
    for device in (CPU, torch.device("meta"), fake_gpu):
        assert streams.current(device) == 0 and not streams.is_capturing(device)
        event = streams.record(device, timing=True)
        event.synchronize()
        assert event.query() and event.elapsed_time(streams.record(device)) == 0.0
    streams.ignore_captures()  # nothing to ignore, and no error


def test_memory_of_a_graph_stays_where_it_is(fake: FakeStreams) -> None:
    def job(comm: Any) -> tuple[bool, ...]:
        arena = Arena()
        small, truth = attention(comm, 16, arena)
        call(small, truth)
        comm.all_gather_ints([0])
        if comm.rank == 0:
            fake.number, fake.capturing = 2, True
        comm.all_gather_ints([0])
        expected = call(small, truth)
        captured, block = addresses(graph(small)), block_of(graph(small))
        comm.all_gather_ints([0])
        if comm.rank == 0:
            fake.number, fake.capturing = 1, False
        comm.all_gather_ints([0])
        large, other = attention(comm, 400, arena)
        call(large, other)  # the arena grows
        again = call(small, truth)  # not captured: in the arena's block
        arena.clear()
        gc.collect()
        comm.all_gather_ints([0])
        if comm.rank == 0:
            fake.capturing = True
        comm.all_gather_ints([0])
        replayed = call(small, truth)
        eager = small._bound[FORWARD, None, 1]
        return (
            torch.equal(expected, again) and torch.equal(expected, replayed),
            addresses(graph(small)) == captured and block_of(graph(small)) == block,
            eager is not graph(small) and not eager.calls,  # clear() unbound it, and not the graph's
        )

    assert run_threads(2, job) == [(True, True, True)] * 2


def test_later_runs_do_not_touch_the_memory_of_a_graph(fake: FakeStreams) -> None:
    arena, tenants = Arena(), [Tenant(64), Tenant(32), Tenant(64)]
    block = arena.block(CPU, 1, tenants[0])
    assert arena.block(CPU, 1, tenants[1]) is block
    arena.capture(tenants[0])
    assert arena.block(CPU, 1, tenants[2]) is not block
    assert set(arena.retired) == set(
        tenants[:2]
    )  # who shares the block must not run any more, but in a capture
    arena.capture(tenants[1])
    arena.block(CPU, 1, Tenant(1000))
    arena.clear()
    assert [tenant.unbound for tenant in tenants] == [1, 0, 3]  # when the block was made; then never


class Tenant:
    def __init__(self, num_bytes: int) -> None:
        self.num_bytes, self.unbound = num_bytes, 0

    def unbind(self) -> None:
        self.unbound += 1


def test_a_capture_binds_nothing(fake: FakeStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """Binding copies tables to the device, which a capture does not allow; two layers share a block."""
    bound: list[str] = []
    plain = Bound.bind

    def bind(self: Bound, block: Tensor, lent: Tensor | None) -> None:
        bound.append(self.schedule.name)
        plain(self, block, lent)

    monkeypatch.setattr(Bound, "bind", bind)

    def job(comm: Any) -> bool:
        arena = Arena()
        layers = [attention(comm, tokens, arena) for tokens in (24, 16)]
        for layer in layers:
            call(*layer)
        comm.all_gather_ints([0])
        if comm.rank == 0:
            fake.number, fake.capturing = 2, True
            bound.clear()
        comm.all_gather_ints([0])
        for layer in layers * 2:
            call(*layer)
        return block_of(graph(layers[0][0])) == block_of(graph(layers[1][0]))

    assert run_threads(2, job) == [True, True]
    assert bound == []


def test_a_layer_that_is_not_captured_leaves_the_memory_of_one_that_is(fake: FakeStreams) -> None:
    def job(comm: Any) -> bool:
        arena = Arena()
        first, second = (attention(comm, tokens, arena) for tokens in (24, 16))
        call(*first), call(*second)
        comm.all_gather_ints([0])
        if comm.rank == 0:
            fake.number, fake.capturing = 2, True
        comm.all_gather_ints([0])
        call(*first)
        comm.all_gather_ints([0])
        if comm.rank == 0:
            fake.number, fake.capturing = 1, False
        comm.all_gather_ints([0])
        call(*second)
        return block_of(second[0]._bound[FORWARD, None, 1]) != block_of(graph(first[0]))

    assert run_threads(2, job) == [True, True]


def test_a_call_that_never_ran_cannot_be_captured(fake: FakeStreams) -> None:
    fake.capturing = True

    def job(comm: Any) -> str:
        try:
            call(*attention(comm, 16, Arena()))
        except (InputError, CommError) as error:
            return str(error)
        return ""

    for message in run_threads(2, job):
        assert message == (
            "A call that is captured in a CUDA graph has never run. "
            "Run it once with the same shapes, on any stream, before the capture."
        )


def test_compiled_graphs_end_before_an_attention() -> None:
    """Else mode="reduce-overhead" would capture what keeps memory of its own."""
    for op in (call_op, call_backward_op):
        assert torch.Tag.cudagraph_unsafe in op._opoverload.tags
