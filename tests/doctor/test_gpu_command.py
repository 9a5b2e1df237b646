"""`weft doctor --gpu` from the command line to the files, on gloo and two CPUs that stand in for GPUs.

Three runs for all tests: every part; parts that hang, crash and are wrong, ended by Ctrl-C; and under
torchrun, with private words in the environment and in an error.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.worlds import becomes_true
from weft.core.files import cache
from weft.doctor.suites import NOT_COVERED, SUITES

ROOT = Path(__file__).parents[2]
SECONDS = 240
COMMAND = ("-m", "weft", "doctor", "--gpu", "--device", "cpu", "--ranks", "2")
MARK = "WEFT_TEST_MARK"
PRIVATE = {
    "USER": "zebulon",
    "LOGNAME": "zebulon",
    "HOSTNAME": "loomhost-7.lab.example",
    "HF_TOKEN": "hf_notForAnybody1234",
    "WEFT_TRANSPORT": "carrier-pigeons-of-zebulon",
}


@dataclass
class Run:
    """A finished command."""

    code: int
    text: str
    errors: str
    out: Path
    left: list[str]
    """Command lines of processes that outlived it."""

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.out / "doctor.json").read_text())

    def suite(self, name: str) -> dict[str, Any]:
        return next(suite for suite in self.report["parts"] if suite["name"] == name)

    def checks(self, name: str) -> dict[str, Any]:
        return {check["name"]: check for check in self.suite(name)["checks"]}


@contextmanager
def started(folder: Path, *words: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run Python with a mark in its environment, by which all that it starts is found."""
    mark = uuid.uuid4().hex
    (folder / "tmp").mkdir()
    own = {"HOME": str(folder / "zebulon"), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    own["XDG_CACHE_HOME"] = str(cache().parent)  # of kernels that are compiled once
    process = subprocess.Popen(
        [sys.executable, *words, "--out", str(folder / "out")],
        cwd=folder,
        env={**os.environ, **own, MARK: mark, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, mark
    finally:
        process.kill()
        process.wait()


def ended(process: subprocess.Popen[str], mark: str, folder: Path, read: str = "") -> Run:
    text, errors = process.communicate(timeout=SECONDS)
    becomes_true(lambda: not marked(mark), within=5.0)
    return Run(process.returncode, read + text, errors, folder / "out", marked(mark))


def marked(mark: str) -> list[str]:
    found: list[str] = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(" ".join(process.cmdline()))
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("whole")
    with started(folder, *COMMAND) as run:
        return ended(*run, folder)


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("faulty")
    faults = {"nccl": "hang:6", "kernel-exact": "crash", "streams": "wrong", "pipeline": "hang"}
    environment = {"WEFT_TEST_FAULTS": " ".join("=".join(fault) for fault in faults.items())}
    environment["PYTHONPATH"] = f"{Path(__file__).parent / 'faults'}:{ROOT}"
    words = (*COMMAND, "--only", ",".join([*faults, "kernel-fa4"]))
    with started(folder, *words, **environment) as (process, mark):
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        read: list[str] = []
        for line in lines:
            read.append(line)
            if line.startswith("streams "):  # the last before the one that hangs
                process.send_signal(signal.SIGINT)
                break
        return ended(process, mark, folder, "".join(read))


@pytest.fixture(scope="module")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("torchrun")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    words = (*launcher, *COMMAND, "--json", "--only", "nccl,strategies")
    with started(folder, *words, GLOO_SOCKET_IFNAME="lo", **PRIVATE) as run:
        return ended(*run, folder)


def test_every_part_runs_and_holds(whole: Run) -> None:
    assert whole.code == 0, whole.text + whole.errors
    assert [suite["name"] for suite in whole.report["parts"]] == [suite.name for suite in SUITES]
    for suite in whole.report["parts"]:
        assert suite["status"] in ("ok", "skipped"), suite
        assert suite["checks"], suite
        assert suite["message"] or suite["status"] == "ok"
        assert 0 < suite["seconds"] <= suite["limit"]


@pytest.mark.soak
@pytest.mark.parametrize("ranks", ["1", "3", "4"])
def test_every_part_holds_on_other_numbers_of_ranks(ranks: str, tmp_path: Path) -> None:
    with started(tmp_path, *COMMAND, "--ranks", ranks) as process:
        run = ended(*process, tmp_path)
    assert run.code == 0, run.text + run.errors


def test_it_begins_with_what_never_ran_and_says_one_line_a_part(whole: Run) -> None:
    lines = whole.text.splitlines()
    claims = [*(claim for suite in SUITES for claim in suite.claims), *NOT_COVERED]
    assert lines[0] == "Never ran on a GPU before:"
    assert " ".join(whole.text.split()).startswith(f"{lines[0]} · {' · '.join(claims)} {len(SUITES)} parts")
    assert whole.report["never_ran"] == claims
    rows = [line for line in lines if line.split(" ", 1)[0] in {suite.name for suite in SUITES}]
    assert [row.split()[:2] for row in rows] == [
        [suite["name"], suite["status"]] for suite in whole.report["parts"]
    ]
    assert [line for line in lines if len(line) > 80 and str(whole.out) not in line] == []
    assert "A rehearsal" in lines[-1]


def test_it_writes_a_page_a_json_and_the_topology(whole: Run) -> None:
    from weft.core.topology import Topology

    assert sorted(path.name for path in whole.out.iterdir()) == [
        "doctor.html",
        "doctor.json",
        "topology.toml",
    ]
    assert all(str(path) in whole.text for path in whole.out.iterdir())
    assert "<html" in (whole.out / "doctor.html").read_text()
    assert Topology.from_toml(whole.out / "topology.toml").ranks == 2
    report = whole.report
    assert report["is_rehearsal"] and report["topology"]["name"]
    assert report["machine"]["ranks"] == 2 and report["machine"]["torch"]


def test_part_that_hangs_is_reported_with_the_stacks_of_all_ranks(faulty: Run) -> None:
    suite = faulty.suite("nccl")
    assert suite["status"] == "hung" and suite["under_way"] == "all ranks meet" and suite["limit"] == 6
    assert "rank 0" in suite["traceback"] and "rank 1" in suite["traceback"]
    assert "in announce_and_break" in suite["traceback"] and "forkserver" not in suite["traceback"]


def test_crash_inside_a_matrix_is_named_and_the_checks_after_it_are_done(faulty: Run, whole: Run) -> None:
    suite = faulty.suite("kernel-exact")
    assert suite["status"] == "crashed" and "rank 1 was killed by SIGABRT" in suite["message"]
    assert "Fatal Python error: Aborted" in suite["traceback"]
    checks = faulty.checks("kernel-exact")
    assert set(checks) == set(whole.checks("kernel-exact"))
    wrong = [name for name, check in checks.items() if check["status"] == "wrong"]
    assert wrong == [suite["under_way"]] and "crashed" in checks[wrong[0]]["note"]


def test_wrong_numbers_are_reported_as_that(faulty: Run) -> None:
    suite = faulty.suite("streams")
    assert suite["status"] == "wrong"
    wrong = [check for check in suite["checks"] if check["status"] == "wrong"]
    numbers = [check["numbers"] for check in wrong]
    assert any(each.get("error", 0.0) > each.get("allowed", 0.0) for each in numbers), wrong


def test_the_rest_goes_on_and_interrupt_writes_what_there_is(faulty: Run) -> None:
    assert faulty.suite("kernel-fa4")["status"] == "skipped" and faulty.suite("kernel-fa4")["checks"]
    assert faulty.suite("pipeline")["message"].startswith("stopped")
    assert faulty.code == 128 + signal.SIGINT, faulty.errors
    assert "Traceback" not in faulty.errors
    assert (faulty.out / "doctor.html").exists()


@pytest.mark.parametrize("name", ["whole", "faulty", "torchrun"])
def test_nothing_is_left_behind(name: str, request: pytest.FixtureRequest) -> None:
    """No process, so no socket either, and no file, also after parts that crashed and hung."""
    run: Run = request.getfixturevalue(name)
    assert run.left == []
    assert [path.name for path in (run.out.parent / "tmp").iterdir() if path.name.startswith("weft-")] == []


def test_under_torchrun_its_ranks_are_used(torchrun: Run) -> None:
    assert json.loads(torchrun.text) == torchrun.report
    assert torchrun.report["machine"]["ranks"] == 2
    assert torchrun.suite("nccl")["status"] == "ok", torchrun.suite("nccl")
    assert torchrun.code == 1  # because of the other


def test_no_private_word_is_in_what_is_written(torchrun: Run) -> None:
    suite = torchrun.suite("strategies")
    assert suite["status"] in ("failed", "wrong"), suite
    assert "WEFT_TRANSPORT" in json.dumps(suite), "the error that has a private word"
    folders = {str(torchrun.out.parent), str(ROOT), os.environ["PATH"], sys.executable}
    for name in ("doctor.json", "doctor.html"):
        text = (torchrun.out / name).read_text().lower()
        assert [word for word in {*PRIVATE.values(), *folders} if word.lower() in text] == []
