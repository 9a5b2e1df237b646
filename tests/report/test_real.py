"""A traced run of real ranks, forward and backward, as a report: its bytes, its calls, its names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import weft
from tests.distributed.jobs import Worlds, attend, problem, tiles_with_empty_rows
from tests.report.viewer import check
from tests.run.dense import Truth
from weft.cli.main import main
from weft.core.codec import dumps
from weft.core.schedule import Schedule
from weft.plan.choose import build
from weft.run.measure.trace import read_trace
from weft.schedule.measure import measure
from weft.simulate.clusters import cluster
from weft.simulate.events import simulate

PLAN = "ring+balanced"


def rank_job(truth: Truth, directory: Path) -> None:
    with weft.trace(directory):
        for _ in range(3):
            attend(truth, {"plan": PLAN, "mask": truth.mask})


@pytest.fixture(scope="module")
def run(worlds: Worlds, tmp_path_factory) -> tuple[Path, Schedule]:
    """The folder of a trace, and the schedule that ran: 37 tokens, empty rows, 3 heads on 2 ranks."""
    folder = tmp_path_factory.mktemp("real") / "trace"
    truth = Truth.of(problem(2, 37), tiles_with_empty_rows(3, 37, 37, 4))
    worlds(2).run(rank_job, truth, folder)
    return folder, build(PLAN, truth.problem, truth.mask)


def report(*words: object) -> dict:
    with pytest.raises(SystemExit) as ended:
        main(["report", *map(str, words)])
    assert not ended.value.code
    return json.loads((Path(str(words[-1])) / "report.json").read_text())


def test_a_traced_run_goes_through_the_report(run, tmp_path):
    folder, schedule = run
    found = report(folder, "-o", tmp_path)
    [case] = found["cases"]
    assert (case["name"], case["ranks"], case["measured"]) == (PLAN, 2, True)
    assert case["shown"] == "the median of 3 forward calls; 3 backward in the trace"
    assert case["traffic"] == measure(schedule).matrix().tolist()  # one forward's, not all six calls'
    shares = case["summary"]["compute"] + case["summary"]["exposed"] + case["summary"]["idle"]
    assert shares == pytest.approx(1.0)
    assert case["loads"]["after"] == list(measure(schedule).work)
    assert {"timeline", "loads", "traffic", "mask-head-0", "memory"} <= set(found["figures"])


def test_its_perfetto_trace_is_valid_and_has_every_call(run, tmp_path):
    report(run[0], "-o", tmp_path)
    trace = json.loads((tmp_path / "trace.json").read_text())
    check(trace)
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(spans) == len(read_trace(run[0]).spans)
    assert {span["name"].split()[0] for span in spans} >= {"attend", "gradient", "send", "wait"}


def test_a_trace_alone_says_what_is_missing(run, tmp_path):
    folder, schedule = run
    assert Schedule.load(folder / "schedule.json") == schedule
    bare = tmp_path / "bare"
    bare.mkdir()
    for path in folder.glob("*.jsonl"):
        (bare / path.name).write_bytes(path.read_bytes())
    found = report(bare, "-o", tmp_path / "out")
    [case] = found["cases"]
    assert case["loads"]["bound"] is None and "One state only" in case["loads"]["note"]
    assert {"timeline", "loads", "traffic"} == set(found["figures"])


def test_it_lies_over_its_own_simulation(run, tmp_path):
    folder, schedule = run
    (tmp_path / "plan.json").write_text(dumps(schedule))
    found = report(folder, tmp_path / "plan.json", "--topology", "2xh100", "-o", tmp_path / "out")
    assert [case["name"] for case in found["cases"]] == [f"{PLAN}, measured", f"{PLAN}, simulated"]
    assert found["cases"][0]["traffic"] == found["cases"][1]["traffic"]
    said, ran = (
        {(s.rank, s.op, s.name) for s in timeline.spans if s.kind in ("attend", "send")}
        for timeline in (simulate(schedule, cluster("2xh100")), read_trace(folder, 0))
    )
    assert said == ran and said
