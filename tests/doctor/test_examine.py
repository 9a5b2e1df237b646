"""The examination: parts within a budget, attempts within a part's limit, and what is written."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import InputError
from weft.doctor import examine
from weft.doctor.child import AttemptSpec
from weft.doctor.examine import Examination, as_json, topology_text, write
from weft.doctor.suite import CheckSuite
from weft.doctor.suites import NOT_COVERED
from weft.doctor.supervisor import AttemptResult

PARTS = [CheckSuite(name=name, title=name, seconds=100, claims=(name,)) for name in "abc"]


def check(name: str, data: Any = None) -> dict[str, Any]:
    return {"name": name, "status": "ok", "note": "", "numbers": {}, "data": data}


class FakeSupervisors:
    """Answer attempts at once, each as the test says, by a clock that only answers move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answers: Any, seconds: float = 10.0) -> None:
        self.now, self.specs, self.answers, self.seconds = 0.0, list[AttemptSpec](), answers, seconds
        self.is_stopped = threading.Event()
        monkeypatch.setattr(time, "monotonic", lambda: self.now)

    def run_attempt(self, spec: AttemptSpec) -> list[AttemptResult]:
        if spec.suite == "machine":
            return [
                AttemptResult(rank=rank, checks=[check("machine", {"torch": "2.13"})]) for rank in range(2)
            ]
        self.specs.append(spec)
        self.now += self.seconds
        return self.answers(spec)

    def examined(self, **options: Any) -> dict[str, Any]:
        examination = Examination(suites=PARTS, device="cpu", **options)
        supervisors: Any = self
        return examine._examined(examination, supervisors, ["zebulon"])


def done(spec: AttemptSpec) -> list[AttemptResult]:
    return [AttemptResult(rank=0, checks=[check(f"of {spec.suite} by zebulon")])]


def test_report_has_the_whole_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    report = FakeSupervisors(monkeypatch, done).examined()
    assert set(report) == {
        "schema", "weft", "date", "is_rehearsal", "made_up", "seconds", "never_ran", "machine", "parts",
        "topology",
    }  # fmt: skip
    assert set(report["parts"][0]) == {
        "name", "title", "status", "seconds", "limit", "message", "under_way", "traceback", "claims",
        "checks",
    }  # fmt: skip
    assert report["machine"] == {"machines": 1, "ranks": 2, "device": "cpu", "gpus": [], "torch": "2.13"}
    assert report["never_ran"] == ["a", "b", "c", *NOT_COVERED]
    assert report["is_rehearsal"] and not report["made_up"]
    assert report["parts"][0]["checks"][0]["name"] == "of a by …"


def test_limit_is_cut_to_what_is_left_and_later_parts_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisors = FakeSupervisors(monkeypatch, done, seconds=40.0)
    report = supervisors.examined(seconds=61.0)
    assert [spec.seconds for spec in supervisors.specs] == [61.0, 21.0]
    assert [suite["status"] for suite in report["parts"]] == ["ok", "ok", "skipped"]
    assert report["parts"][2]["message"].startswith("no time left")


def test_part_that_the_budget_cut_is_not_hung(monkeypatch: pytest.MonkeyPatch) -> None:
    def hung(spec: AttemptSpec) -> list[AttemptResult]:
        checks = [check("done")]
        return [
            AttemptResult(
                rank=0, ending="hung", under_way="x", is_in_check=True, message="still", checks=checks
            )
        ]

    report = FakeSupervisors(monkeypatch, hung, seconds=100.0).examined(seconds=130.0)
    assert [suite["status"] for suite in report["parts"]] == ["hung", "skipped", "skipped"]
    assert report["parts"][1]["message"] == "the budget left it 30 of its 100 s"
    assert [each["name"] for each in report["parts"][1]["checks"]] == ["done"]


def test_part_goes_on_after_crashes_with_what_is_left_at_most_four_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def crash(spec: AttemptSpec) -> list[AttemptResult]:
        name = f"check {len(spec.finished)}"
        return [AttemptResult(rank=0, ending="crashed", under_way=name, is_in_check=True, message="died")]

    supervisors = FakeSupervisors(monkeypatch, crash)
    report = supervisors.examined(seconds=1000.0)
    first = [spec for spec in supervisors.specs if spec.suite == "a"]
    assert [spec.seconds for spec in first] == [100.0, 90.0, 80.0, 70.0]
    assert [len(spec.finished) for spec in first] == [0, 1, 2, 3]
    assert report["parts"][0]["status"] == "crashed" and len(report["parts"][0]["checks"]) == 4


def test_no_attempt_begins_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(spec: AttemptSpec) -> list[AttemptResult]:
        return [AttemptResult(rank=0, ending="crashed", under_way="x", is_in_check=True, message="died")]

    supervisors = FakeSupervisors(monkeypatch, crash, seconds=99.0)
    supervisors.examined(seconds=1000.0)
    assert [spec.suite for spec in supervisors.specs] == ["a", "b", "c"]


def test_stop_keeps_what_was_done_and_begins_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(spec: AttemptSpec) -> list[AttemptResult]:
        supervisors.is_stopped.set()
        return [AttemptResult(rank=0, ending="stopped", checks=[check("first")])]

    supervisors = FakeSupervisors(monkeypatch, stopped)
    report = supervisors.examined()
    assert len(supervisors.specs) == 1
    assert [suite["message"] for suite in report["parts"]] == [
        "stopped while it ran", "stopped before it began", "stopped before it began",
    ]  # fmt: skip
    assert report["parts"][0]["checks"][0]["name"] == "first"


def test_ranks_without_a_gpu_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    supervisors = FakeSupervisors(monkeypatch, done)
    failed = AttemptResult(rank=1, ending="failed", message="InputError: torch sees no GPU on this rank.")
    monkeypatch.setattr(supervisors, "run_attempt", lambda _: [AttemptResult(rank=0), failed])
    with pytest.raises(InputError, match=r"^Rank 1: torch sees no GPU on this rank\.$"):
        supervisors.examined()


def test_files_are_a_page_a_json_and_the_topology(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def topology(spec: AttemptSpec) -> list[AttemptResult]:
        return (
            [AttemptResult(rank=0, checks=[check("topology", "name = 'x'\n")])]
            if spec.suite == "b"
            else done(spec)
        )

    report = FakeSupervisors(monkeypatch, topology).examined()
    files = write(report, tmp_path / "new" / "out")
    assert [path.name for path in files] == ["doctor.json", "topology.toml", "doctor.html"]
    assert json.loads(files[0].read_text()) == report == json.loads(as_json(report))
    assert "of a by …" in files[2].read_text()
    assert files[1].read_text() == topology_text(report["parts"]) == "name = 'x'\n"
    assert report["topology"] == {"name": "x"}
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="--out"):
        write(report, tmp_path / "file" / "out")
