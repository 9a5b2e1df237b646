"""Meter: every run is marked on a host, one attention of each denoising step on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.plan.choose import build
from weft.program.lower import lower
from weft.program.steps import Attention, Post, Wait
from weft.run.measure import clocks, meter
from weft.run.measure.meter import REBASE_SECONDS, Meter, MeterTotals

TOKENS = Layout.even(24, 2)
PROBLEM = Problem(batch=1, heads=2, kv_heads=2, head_dim=4, q=TOKENS, kv=TOKENS)
SCHEDULE = build("ring", PROBLEM, BlockMask.dense(2, 24))
PROGRAM = lower(SCHEDULE, 0)
TICK = 1000


class Ticks:
    """A clock on which every mark is a microsecond after the last one."""

    def __init__(self) -> None:
        self.now = self.begun = 0

    def mark(self) -> int:
        self.now += TICK
        return self.now

    def nanoseconds(self, marks: list[int]) -> list[int]:
        return marks

    def begin(self) -> None:
        self.begun += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Ticks:
    ticks = Ticks()
    monkeypatch.setattr(clocks, "clock_of", lambda _: ticks)
    return ticks


def steps(watch: Meter, device: str, layers: list[int]) -> list[MeterTotals]:
    """Denoising steps of so many attentions each."""
    frame: Any = SimpleNamespace(device=torch.device(device), comm=SimpleNamespace(size=2, rank=0))
    ran: list[Any] = []
    bound: Any = SimpleNamespace(
        program=PROGRAM, schedule=SCHEDULE, calls=[ran.append] * len(PROGRAM.steps), run=ran.append
    )
    spent: list[MeterTotals] = []
    for count in layers:
        for _ in range(count):
            watch.run(bound, frame)
        spent.append(watch.take())
    return spent


def expected(runs: int, *, first: bool) -> MeterTotals:
    kinds = [type(step) for step in PROGRAM.steps]
    sent = sum(step.num_bytes for step in PROGRAM.steps if isinstance(step, Post))
    attending, waiting = (runs * kinds.count(kind) * TICK for kind in (Attention, Wait))
    return MeterTotals(attending, waiting, runs * sent, runs, int(first))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_spent_is_that_of_all_runs(clock: Ticks, device: str) -> None:
    Meter._known.discard(SCHEDULE)
    assert steps(Meter(), device, [3, 5]) == [expected(3, first=True), expected(5, first=False)]
    assert clock.begun == 0


def test_on_a_gpu_one_attention_of_a_step_is_marked(clock: Ticks) -> None:
    watch = Meter()
    steps(watch, "cuda", [4, 4, 4])
    assert clock.now == 3 * (len(PROGRAM.steps) + 1) * TICK
    assert watch.last is not None and len(watch.last[2]) == len(PROGRAM.steps) + 1
    steps(watch, "cpu", [4])
    assert clock.now == 7 * (len(PROGRAM.steps) + 1) * TICK


def test_nothing_is_marked_while_a_graph_is_captured(clock: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks.streams, "is_capturing", lambda _: True)
    watch = Meter()
    (spent,) = steps(watch, "cuda", [4])
    assert (spent.attending, spent.runs, clock.now, watch.last) == (0, 4, 0, None)


def test_clocks_begin_again_before_they_are_coarse(clock: Ticks, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.0, 1.0, REBASE_SECONDS + 1, REBASE_SECONDS + 1, REBASE_SECONDS + 2])
    monkeypatch.setattr(meter.time, "monotonic", lambda: next(times))
    steps(Meter(), "cuda", [1, 1, 1])
    assert clock.begun == 1
