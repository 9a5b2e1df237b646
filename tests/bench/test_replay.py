"""Replay: real attentions in a simulated cluster."""

from __future__ import annotations

import pytest

from bench import replay as module
from bench.replay import measure_attends, replay
from tests.report.viewer import check
from tests.run.test_trace import case
from weft.core.errors import InputError
from weft.core.topology import Link, Topology
from weft.plan.choose import build
from weft.report.perfetto import chrome_trace
from weft.run.measure import trace
from weft.run.measure.clocks import HostClock
from weft.schedule.measure import measure
from weft.schedule.reverse import reverse

CLUSTER = Topology(machines=2, devices=3, inter=Link(latency=1e-5, bandwidth=1e9))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["ring", "ulysses", "gather", "zigzag", "usp:2x3+balanced"])
def test_every_attend_is_run_and_takes_in_the_cluster_what_it_took_here(name: str, sparse: bool) -> None:
    truth = case(6, sparse=sparse)
    schedule = build(name, truth.problem, truth.mask)
    found = replay(schedule, CLUSTER, repeats=1)
    attends = {span.op: span for span in found.spans if span.kind == "attend"}
    assert {op: span.rank for op, span in attends.items()} == {i: op.rank for i, op in schedule.attends()}
    assert all(span.seconds > 0 for span in attends.values())
    assert int(found.traffic.sum()) == measure(schedule).total_bytes
    check(chrome_trace(found))
    assert trace.active is None


def test_the_times_are_medians_of_the_runs_after_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = case(2)
    schedule = build("ring", truth.problem, truth.mask)
    runs: list[int] = []

    class Counting(HostClock):
        """Every step of a rank's n-th run takes so many seconds."""

        def __init__(self) -> None:
            self.now = 0
            runs.append(len(runs) % 4)

        def mark(self) -> int:
            self.now += (100, 5, 1, 3)[runs[-1]] * 10**9
            return self.now

    monkeypatch.setattr(module, "HostClock", Counting)
    assert measure_attends(schedule, repeats=3) == {index: 3.0 for index, _ in schedule.attends()}
    assert len(runs) == 2 * 4


def test_the_simulated_attends_are_as_long_as_the_measured_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    truth = case(3)
    schedule = build("ring", truth.problem, truth.mask)
    made_up = {index: 0.5 + index for index, _ in schedule.attends()}
    monkeypatch.setattr(module, "measure_attends", lambda *_: made_up)
    found = replay(schedule, Topology(devices=3))
    assert {s.op: s.seconds for s in found.spans if s.kind == "attend"} == pytest.approx(made_up)


def test_what_cannot_be_replayed_is_refused() -> None:
    truth = case(2)
    schedule = build("ring", truth.problem, truth.mask)
    with pytest.raises(InputError, match="backward"):
        replay(reverse(schedule), CLUSTER)
    with pytest.raises(InputError, match="repeats must be"):
        replay(schedule, CLUSTER, repeats=0)
