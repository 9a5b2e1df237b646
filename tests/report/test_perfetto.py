"""Chrome traces: simulated and measured ones are valid, and what is wrong with others is found."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import weft
from tests.report.viewer import check
from tests.run.test_trace import case, run
from weft.core.timeline import Span, Timeline
from weft.core.topology import Link, Topology
from weft.plan.choose import build
from weft.report import perfetto
from weft.report.perfetto import chrome_trace, write_trace
from weft.run.measure.trace import read_trace
from weft.simulate.events import simulate

SEND = Span(0, "comm", "send", "send hop 1 → 1", 0.1, 0.4, op=1, peer=1, num_bytes=300)
TWO = Timeline(
    "by hand",
    2,
    (
        Span(0, "compute", "attend", "attend hop 0", 0.0, 0.3, op=0),
        Span(1, "compute", "wait", "wait hop 1 ← 0", 0.2, 0.4, op=1, peer=0),
        Span(1, "compute", "attend", "attend hop 1", 0.4, 0.5, op=2),
        SEND,
    ),
    machines=2,
)


def events(trace: dict[str, Any], phase: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == phase]


def test_spans_lanes_and_names_of_a_small_one() -> None:
    trace = chrome_trace(TWO)
    check(trace)
    shown = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in events(trace, "X")]
    assert shown == [
        (0, 0, "attend hop 0", 0.0, 300000.0),
        (0, 1, "send hop 1 → 1", 100000.0, 300000.0),
        (1, 0, "wait hop 1 ← 0", 200000.0, 200000.0),
        (1, 0, "attend hop 1", 400000.0, 100000.0),
    ]
    names = {e["args"]["name"] for e in events(trace, "M") if e["name"] == "process_name"}
    assert names == {"rank 0 · machine 0", "rank 1 · machine 1"}
    (begin,), (end,) = events(trace, "s"), events(trace, "f")
    assert (begin["pid"], begin["tid"], begin["ts"]) == (0, 1, 100000.0)
    assert (end["pid"], end["tid"], end["ts"], end["bp"]) == (1, 0, 200000.0, "e")
    flying = [(e["ts"], e["args"]["bytes"]) for e in events(trace, "C")]
    assert flying == [(100000.0, 300), (400000.0, 0)]


def test_an_arrow_without_a_wait_leads_to_what_begins_next_or_to_the_arrival() -> None:
    attend = TWO.spans[2]
    (end,) = events(chrome_trace(Timeline("", 2, (SEND, attend))), "f")
    assert (end["pid"], end["tid"], end["ts"]) == (1, 0, 400000.0)
    early = Span(1, "compute", "wait", "wait for something else", 0.0, 0.2, op=1, peer=0)
    (end,) = events(chrome_trace(Timeline("", 2, (SEND, early, attend))), "f")
    assert end["ts"] == 400000.0
    trace = chrome_trace(Timeline("", 2, (SEND,)))
    check(trace)
    (end,) = events(trace, "f")
    assert (end["pid"], end["tid"], end["ts"]) == (1, 1, 400000.0)


def test_sends_that_are_under_way_together_get_lanes_of_their_own() -> None:
    spans = [Span(0, "comm", "send", f"send → {i}", 0.1 * i, 0.1 * i + 0.15, i, 1, 10) for i in range(1, 6)]
    trace = chrome_trace(Timeline("", 2, tuple(spans)))
    check(trace)
    assert [e["tid"] for e in events(trace, "X") if e["cat"] == "send"] == [1, 2, 1, 2, 1]
    assert max(e["args"]["bytes"] for e in events(trace, "C")) == 20


def topologies() -> list[Topology]:
    slow = Link(latency=1e-4, bandwidth=1e6)
    return [
        Topology(devices=4, intra=slow),
        Topology(machines=2, devices=2, inter=slow, memory_bandwidth=1e8, post_seconds=1e-6, two_sided=True),
        Topology(machines=4, inter=slow, barriers=True, cores=1, comm_slowdown=0.3),
    ]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("name", ["ring", "zigzag", "ulysses", "gather", "usp:2x2", "usp:2x2+balanced"])
def test_simulated_traces_are_valid(name: str, sparse: bool) -> None:
    truth = case(4, sparse=sparse)
    schedule = build(name, truth.problem, truth.mask)
    for topology in topologies():
        timeline = simulate(schedule, topology)
        trace = chrome_trace(timeline)
        check(trace)
        sends = [span for span in timeline.spans if span.kind == "send"]
        assert len(events(trace, "s")) == len(sends)
        arrivals = [event for event in events(trace, "X") if event["cat"] == "arrival"]
        assert len(events(trace, "X")) == len(timeline.spans) + len(arrivals)


@pytest.mark.parametrize("name", ["ring", "ulysses", "gather", "usp:2x2"])
def test_measured_traces_are_valid(tmp_path: Path, name: str) -> None:
    truth = case(4)
    with weft.trace(tmp_path):
        run(truth, build(name, truth.problem, truth.mask), times=2)
    timeline = read_trace(tmp_path)
    check(chrome_trace(timeline))
    assert sum(span.kind == "send" for span in timeline.spans) == len(events(chrome_trace(timeline), "f"))


def test_large_traces_are_zipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = write_trace(TWO, tmp_path / "deep" / "trace.json")
    assert small == tmp_path / "deep" / "trace.json"
    monkeypatch.setattr(perfetto, "GZIP_ABOVE", 100)
    large = write_trace(TWO, small)
    assert large.name == "trace.json.gz"
    assert json.loads(gzip.decompress(large.read_bytes())) == json.loads(small.read_bytes())
    assert json.loads(small.read_bytes()) == chrome_trace(TWO)


def drop(phase: str) -> Callable[[list[dict[str, Any]]], None]:
    return lambda given: given.remove(next(e for e in given if e["ph"] == phase))


def change(phase: str, **fields: Any) -> Callable[[list[dict[str, Any]]], None]:
    return lambda given: next(e for e in given if e["ph"] == phase).update(fields)


def overlap(given: list[dict[str, Any]]) -> None:
    given.append({"ph": "X", "pid": 0, "tid": 0, "ts": 2e5, "dur": 2e5, "name": "late", "cat": "copy"})


def no_names(given: list[dict[str, Any]]) -> None:
    given[:] = [event for event in given if event["name"] != "thread_name"]


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (drop("s"), "one beginning and one end"),
        (drop("f"), "one beginning and one end"),
        (change("s", id=7), "one beginning and one end"),
        (change("f", ts=1.0), "ends before it begins"),
        (change("f", ts=9e9), "in no span"),
        (change("s", tid=5), "in no span"),
        (change("X", ts=-1.0), "negative"),
        (change("X", dur=-1.0), "negative"),
        (change("C", args={"bytes": -1}), "negative"),
        (overlap, "ends after the one it began in"),
        (no_names, "has no name"),
    ],
)
def test_what_a_viewer_would_draw_wrong_is_found(
    damage: Callable[[list[dict[str, Any]]], None], told: str
) -> None:
    trace = copy.deepcopy(chrome_trace(TWO))
    damage(trace["traceEvents"])
    with pytest.raises(ValueError, match=told):
        check(trace)


def test_a_compute_lane_that_overlaps_is_found() -> None:
    spans = (TWO.spans[0], Span(0, "compute", "copy", "copy", 0.2, 0.35))
    with pytest.raises(ValueError, match="ends after"):
        check(chrome_trace(Timeline("", 1, spans)))


def test_a_timeline_without_spans_is_a_valid_trace() -> None:
    check(chrome_trace(Timeline("nothing", 0, ())))
    check(chrome_trace(Timeline("nothing", 3, ())))
