"""Traces with threads as ranks: what is recorded, what is read back, and what is left after a failure."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import weft
from tests.run.dense import Truth
from tests.threads import ThreadComm, run_threads
from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.timeline import Span, Timeline
from weft.core.topology import Link, Topology
from weft.plan.choose import build
from weft.program.lower import lower_all
from weft.program.steps import Attention, Gradient
from weft.run.execute import Executor
from weft.run.kernels import choose
from weft.run.measure import clocks, recorder, trace
from weft.run.measure.trace import read_trace
from weft.schedule.measure import measure
from weft.schedule.reverse import reverse
from weft.simulate.events import simulate

PLANS = [
    (1, "ring"),
    (2, "ring"),
    (3, "ulysses"),
    (3, "gather+balanced"),
    (4, "usp:2x2"),
    (4, "usp:2x2+balanced"),
    (5, "zigzag"),
    (5, "ring+cuts"),
]


def case(ranks: int, *, sparse: bool = False) -> Truth:
    tokens = Layout.even(31, ranks)
    problem = Problem(batch=2, heads=4, kv_heads=2, head_dim=3, q=tokens, kv=tokens, dtype="float64")
    if not sparse:
        return Truth.of(problem)
    tiles = torch.rand(4, 8, 8, generator=torch.Generator().manual_seed(ranks)) < 0.3
    tiles[:, :3] = False
    return Truth.of(problem, BlockMask.from_tiles(tiles.numpy(), q_len=31, kv_len=31, block_q=4))


def run(truth: Truth, schedule: Schedule, times: int = 1) -> list[list[Tensor]]:
    """By rank, the outputs and gradients of so many runs forward and backward."""

    def job(comm: ThreadComm) -> list[Tensor]:
        executor, inputs = Executor(schedule, comm, choose("exact")), truth.inputs(comm.rank)
        found: list[Tensor] = []
        for _ in range(times):
            out, saved = executor.forward(*inputs, truth.scale, keep=True)
            grads = executor.backward(truth.slope(comm.rank), inputs, out, saved, truth.scale)
            found += [out, *grads]
        return found

    return run_threads(truth.problem.ranks, job)


def disjoint(timeline: Timeline) -> bool:
    for rank in range(timeline.ranks):
        spans = [span for span in timeline.of(rank) if span.lane == "compute"]
        if any(one.end > two.start for one, two in zip(spans, spans[1:], strict=False)):
            return False
    return True


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("ranks", "name"), PLANS)
def test_a_trace_shows_the_schedule(tmp_path: Path, ranks: int, name: str, sparse: bool) -> None:
    truth = case(ranks, sparse=sparse)
    ahead = build(name, truth.problem, truth.mask)
    with weft.trace(tmp_path):
        run(truth, ahead)
    for call, schedule in enumerate((ahead, reverse(ahead))):
        found = read_trace(tmp_path, call)
        assert found.measured
        assert found.ranks == ranks
        assert disjoint(found)
        assert all(span.end >= span.start >= 0 for span in found.spans)
        links = {(i, j): int(found.traffic[i, j]) for i in range(ranks) for j in range(ranks)}
        assert {pair: size for pair, size in links.items() if size} == measure(schedule).link_bytes
        attends = [(s.rank, s.op, s.name) for s in found.spans if s.kind == "attend"]
        steps = [
            (p.rank, s) for p in lower_all(schedule) for s in p.steps if isinstance(s, Attention | Gradient)
        ]
        assert sorted(attends) == sorted((rank, step.op, step.label) for rank, step in steps)
        assert {(rank, op) for rank, op, _ in attends} == {(a.rank, i) for i, a in schedule.attends()}
        sends = Counter((s.rank, s.name) for s in found.spans if s.kind == "send")
        pairs = {(t.src, i, t.dst) for i, t in schedule.transfers()}
        assert sends == Counter((src, f"send {schedule.ops[i].label} → {dst}") for src, i, dst in pairs)


@pytest.mark.parametrize("name", ["ring", "ulysses", "gather", "usp:2x2+balanced"])
def test_simulated_and_measured_spans_have_the_same_names(tmp_path: Path, name: str) -> None:
    truth = case(4, sparse=True)
    ahead = build(name, truth.problem, truth.mask)
    with weft.trace(tmp_path):
        run(truth, ahead)
    for call, schedule in enumerate((ahead, reverse(ahead))):
        slow = Topology(devices=4, intra=Link(latency=1e-3, bandwidth=1e4), memory_bandwidth=1e8)
        told, found = (
            {(s.rank, s.lane, s.kind, s.name) for s in timeline.spans}
            for timeline in (simulate(schedule, slow), read_trace(tmp_path, call))
        )
        assert told <= found
        assert {s for s in found if s[2] in ("attend", "send")} <= told


def test_outputs_and_gradients_are_the_same_bits_with_and_without(tmp_path: Path) -> None:
    truth = case(3, sparse=True)
    schedule = build("usp:1x3", truth.problem, truth.mask)
    plain = run(truth, schedule)
    with weft.trace(tmp_path):
        traced = run(truth, schedule)
    for one, two in zip(plain, traced, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(one, two, strict=True))


def test_a_send_has_arrived_when_its_receiver_has_stopped_waiting(tmp_path: Path) -> None:
    truth = case(3)
    ahead = build("ring", truth.problem, truth.mask)
    with weft.trace(tmp_path):
        run(truth, ahead, times=3)
    found = read_trace(tmp_path)
    waits = {(s.call, s.op, s.peer, s.rank): s for s in found.spans if s.kind == "wait"}
    sends = [span for span in found.spans if span.kind == "send"]
    assert len(sends) == 3 * sum(
        len({(i, t.src, t.dst) for i, t in s.transfers()}) for s in (ahead, reverse(ahead))
    )
    for send in sends:
        assert send.end <= waits[send.call, send.op, send.rank, send.peer].end


def test_nothing_is_recorded_while_nothing_is_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("this is for traces")

    truth = case(2)
    schedule = build("ring", truth.problem, truth.mask)
    with weft.trace(tmp_path):
        run(truth, schedule)
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    monkeypatch.setattr(recorder, "outline", fail)
    monkeypatch.setattr(clocks, "run_marked", fail)
    monkeypatch.setattr(Span, "__init__", fail)
    assert trace.active is None
    run(truth, schedule)
    assert {path: path.read_text() for path in tmp_path.iterdir()} == before


class BrokenError(Exception):
    pass


def broken_after(calls: int) -> Any:
    kernel = choose("exact")
    attend, left = kernel.attend, iter(range(calls))

    def sometimes(*given: Any, **options: Any) -> Any:
        if next(left, None) is None:
            raise BrokenError
        return attend(*given, **options)

    kernel.attend = sometimes
    return kernel


def test_a_failure_leaves_everything_up_to_the_step_that_failed(tmp_path: Path) -> None:
    truth = case(1)
    schedule = build("ring", truth.problem, truth.mask)

    def job(comm: ThreadComm) -> None:
        executor = Executor(schedule, comm, broken_after(2))
        for _ in range(5):
            executor.forward(*truth.inputs(0), truth.scale, keep=False)

    with pytest.raises(BrokenError), weft.trace(tmp_path):
        run_threads(1, job)
    assert trace.active is None
    found = [[span.kind for span in read_trace(tmp_path, call).spans] for call in range(4)]
    assert found == [["attend"], ["attend"], ["attend"], []]


def test_half_a_line_of_a_rank_that_was_killed_is_left_out(tmp_path: Path) -> None:
    truth = case(2)
    with weft.trace(tmp_path):
        run(truth, build("ring", truth.problem, truth.mask))
    whole = read_trace(tmp_path)
    path = tmp_path / "rank1.jsonl"
    path.write_text(path.read_text()[:-9])
    assert len(read_trace(tmp_path).spans) == len(whole.spans) - 1


def test_memory_is_bounded_and_what_is_full_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MAX_PENDING_STEPS", 20)
    truth = case(2)
    schedule = build("ring", truth.problem, truth.mask)
    with weft.trace(tmp_path):
        run(truth, schedule, times=20)
        assert isinstance(trace.active, recorder.Tracer)
        assert all(len(one.marked._runs) <= 20 for one in trace.active.recorders.values())
        already = read_trace(tmp_path)
    assert {span.call for span in already.spans} >= set(range(30))
    assert {span.call for span in read_trace(tmp_path).spans} == set(range(40))


def test_a_trace_of_fewer_ranks_takes_the_place_of_one_of_more(tmp_path: Path) -> None:
    for ranks in (3, 2):
        truth = case(ranks)
        with weft.trace(tmp_path):
            run(truth, build("ring", truth.problem, truth.mask))
    assert read_trace(tmp_path).ranks == 2
    assert {span.rank for span in read_trace(tmp_path).spans} == {0, 1}


def test_traces_may_be_nested_and_the_inner_one_gets_the_runs(tmp_path: Path) -> None:
    truth = case(2)
    schedule = build("ring", truth.problem, truth.mask)
    with weft.trace(tmp_path / "outer"):
        with weft.trace(tmp_path / "inner"):
            run(truth, schedule)
        run(truth, schedule, times=2)
    assert {span.call for span in read_trace(tmp_path / "inner").spans} == {0, 1}
    assert {span.call for span in read_trace(tmp_path / "outer").spans} == {0, 1, 2, 3}


def test_a_folder_without_a_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no trace"):
        read_trace(tmp_path)


class Skewed:
    """A clock for each thread, and how far it is ahead of the true one."""

    def __init__(self) -> None:
        self.ahead: dict[int, int] = {}

    def monotonic_ns(self) -> int:
        return time.monotonic_ns() + self.ahead[threading.get_ident()]


@pytest.mark.parametrize("ahead", [0, 10**12, -(10**15)])
def test_clocks_that_differ_are_found_out_as_closely_as_is_promised(
    ahead: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    skewed, truth = Skewed(), (0, ahead, 0)
    monkeypatch.setattr(clocks, "time", skewed)

    def job(comm: ThreadComm) -> clocks.Alignment:
        skewed.ahead[threading.get_ident()] = truth[comm.rank]
        return clocks.align(comm)

    first, second, third = run_threads(3, job)
    assert first.clocks == second.clocks == third.clocks
    for (offset, unsure), true in zip(first.clocks, truth, strict=True):
        assert abs(offset - true) <= unsure + 1
        assert (offset == 0) == (true == 0)
    assert second.shift - first.shift == first.clocks[1][0]
    assert third.shift == first.shift


class FakeEvent:
    """A CUDA event on a stream whose next mark is always a quarter of a millisecond later."""

    passed = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, _: Any) -> None:
        FakeEvent.passed += 1
        self.at = FakeEvent.passed

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: FakeEvent) -> float:
        return (later.at - self.at) / 4


def test_events_of_a_gpu_become_times_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    host = iter((10**9, 2 * 10**9))
    monkeypatch.setattr(clocks, "time", SimpleNamespace(monotonic_ns=lambda: next(host)))
    clock = clocks.CudaClock(torch.device("cuda"))
    marks = [clock.mark() for _ in range(3)]
    assert clock.nanoseconds(marks[:1]) == [10**9 + 250_000]
    assert clock.nanoseconds(marks[1:]) == [10**9 + 500_000, 10**9 + 750_000]
    clock.begin()
    assert clock.nanoseconds([clock.mark()]) == [2 * 10**9 + 250_000]


def test_the_environment_traces_until_the_process_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_the_end: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", at_the_end.append)
    monkeypatch.setattr(trace, "active", None)
    trace.trace_from_environment()
    assert trace.active is None
    monkeypatch.setenv("WEFT_TRACE", str(tmp_path / "new"))
    trace.trace_from_environment()
    truth = case(2)
    run(truth, build("ring", truth.problem, truth.mask))
    (end,) = at_the_end
    end()
    assert {span.call for span in read_trace(tmp_path / "new").spans} == {0, 1}


def test_files_are_timelines_and_reading_them_needs_no_torch(tmp_path: Path) -> None:
    truth = case(2)
    with weft.trace(tmp_path):
        run(truth, build("ring", truth.problem, truth.mask))
    text = (tmp_path / "rank1.jsonl").read_text()
    part = Timeline.from_jsonl(text)
    assert {span.rank for span in part.spans} == {1}
    assert part.name == "ring"
    assert len(part.clocks) == 2
    assert Timeline.from_jsonl(part.to_jsonl()) == part
    assert json.loads(text.splitlines()[0])["measured"] is True
    code = f"""
import sys
sys.modules["torch"] = None
from weft.run.measure.trace import read_trace
print(read_trace({str(tmp_path)!r}).ranks)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "2\n", done.stderr
