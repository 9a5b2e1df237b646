"""The runner of all benchmarks, on small ones: what it goes on after, what it repeats, what it writes."""

from __future__ import annotations

import fcntl
import json
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bench import all as runner
from bench.results import BEGIN, END, number, publish

FAKE = """
import argparse, json, sys
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--quick", action="store_true")
parser.add_argument("--json", type=Path)
options = parser.parse_args()
with open("calls.txt", "a") as calls:
    print({name!r}, options.quick, file=calls)
{work}
rows = {rows!r}
found = {{"machine": "a loom", "quick": options.quick, "rows": rows, "lines": []}}
options.json.write_text(json.dumps(found))
if __name__ == "__main__":
    sys.exit(0 if all(row["holds"] for row in rows) else 1)
"""

# The lock is held until the child has ended too.
HANG = """
import fcntl, subprocess, time
held = open("held", "w")
fcntl.flock(held, fcntl.LOCK_EX)
subprocess.Popen(["sleep", "60"], pass_fds=[held.fileno()])
time.sleep(60)
"""


def row(case: str, *, holds: bool = True, **more: Any) -> dict[str, Any]:
    plain = {"measured": 1.25, "unit": "ms", "peer": 2000.0, "peer_name": "hand", "limit": None, "bar": "≤ 2"}
    return {"case": case, **plain, "holds": holds, **more}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with three benchmarks and a page: one holds, one raises, one misses a bar."""
    (tmp_path / "bench").mkdir()
    benches = {
        "even": ("", [row("simulated, 8 ranks"), row("a|b")]),
        "fails": ("raise ValueError('warp')", []),
        "papers": ("", [row("one", holds=False), row("two", measured=None, peer=None, peer_name="")]),
    }
    for name, (work, rows) in benches.items():
        (tmp_path / "bench" / f"{name}.py").write_text(FAKE.format(name=name, work=work, rows=rows))
    for name in ("__init__", "rows"):  # no commands
        (tmp_path / "bench" / f"{name}.py").write_text("")
    (tmp_path / "results.md").write_text(f"# Results\n\nKept.\n\n{BEGIN}\n{END}\n\nKept too.\n")
    return tmp_path


def called(tree: Path) -> list[str]:
    return (tree / "calls.txt").read_text().splitlines()


def run(tree: Path, *names: str, quick: tuple[str, ...] = ()) -> bool:
    chosen = names or tuple(runner.names(tree))
    return runner.run_all(chosen, tree / "runs", tree / "results.md", quick=quick, root=tree)


def test_all_run_and_all_rows_are_written(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert runner.names(tree) == ["even", "fails", "papers"]
    assert not run(tree, quick=("papers",))
    assert called(tree) == ["even False", "fails False", "papers True"]
    text = (tree / "results.md").read_text()
    assert text.startswith("# Results\n\nKept.\n") and text.endswith(f"{END}\n\nKept too.\n")
    for line in (
        "3 of 4 rows hold; 1 benchmarks failed.",
        "| simulated, 8 ranks | 1.25 (simulated) | ms | 2,000 hand |  | ≤ 2 | yes |",
        "| a\\|b | 1.25 | ms | 2,000 hand |  | ≤ 2 | yes |",
        "| one | 1.25 (simulated) | ms | 2,000 hand |  | ≤ 2 | **no** |",
        "| two |  (simulated) | ms |  |  | ≤ 2 | yes |",
    ):
        assert line in text.splitlines()
    assert "s: **failed**, ended with 1 and no rows." in text
    assert "`python -m bench.papers --quick`, " in text and "s on a loom: 1 of 2 rows hold." in text
    assert "warp" in (tree / "runs" / "fails.log").read_text()
    assert "3/3 bench.papers: 1 of 2 rows hold" in capsys.readouterr().out


def test_the_same_code_is_not_measured_twice_but_failures_are(tree: Path, monkeypatch) -> None:
    assert run(tree, "even")
    run(tree)
    assert called(tree) == ["even False", "fails False", "papers False"]
    run(tree)
    assert called(tree)[3:] == ["fails False"]
    monkeypatch.setattr(runner, "state", lambda _: "changed")
    run(tree, "even")
    assert called(tree)[4:] == ["even False"]


def test_changed_code_is_measured_again(tree: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
        subprocess.run(["git", *who, *words], cwd=tree, check=True, capture_output=True)

    git("init", "-q")
    git("add", "bench")
    git("commit", "-qm", "first")
    states = [runner.state(tree)]
    (tree / "bench" / "rows.py").write_text("rows = 1\n")
    states.append(runner.state(tree))
    git("commit", "-qam", "second")
    (tree / "results.md").write_text("# no code\n")
    git("add", "results.md")
    states.append(runner.state(tree))
    git("commit", "-qm", "third")
    assert len(set(states)) == 3
    assert states[1].startswith(f"{states[0]}+")
    assert runner.state(tree) == states[2]


def test_a_benchmark_that_hangs_is_ended_with_what_it_started(tree: Path, monkeypatch) -> None:
    (tree / "bench" / "even.py").write_text(FAKE.format(name="even", work=HANG, rows=[]))
    monkeypatch.setattr(runner, "LONGEST_SECONDS", 1.0)
    (tree / "runs").mkdir()
    assert runner.run("even", tree / "runs", quick=False, root=tree)["failed"] == "did not end in time"
    with (tree / "held").open("w") as held:
        for _ in range(100):
            with suppress(BlockingIOError):
                return fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.05)
    pytest.fail("its child lives on")


def test_quick_rows_do_not_replace_whole_ones(tree: Path) -> None:
    record = json.loads(json.dumps({
        "name": "even", "commit": "1", "command": "python -m bench.even", "quick": False, "date": "1 Jan",
        "seconds": 9, "failed": "", "machine": "m", "rows": [row("whole")],
    }))  # fmt: skip
    quick = record | {"command": "python -m bench.even --quick", "quick": True, "rows": [row("small")]}
    page = tree / "results.md"
    for step, expected in ((quick, "small"), (record, "whole"), (quick, "whole")):
        publish([step], page)
        assert f"| {expected} |" in page.read_text() and page.read_text().count("### bench.even") == 1
    publish([record | {"name": "other"}], page)
    assert page.read_text().count("| whole |") == 2
    page.write_text("# Results\n")
    with pytest.raises(SystemExit, match="has no <!-- bench -->"):
        publish([record], page)


def test_numbers_are_short() -> None:
    assert [number(value) for value in (None, 0.0, 0.97812, 1234.5, 2e-6)] == [
        "",
        "0",
        "0.9781",
        "1,234",
        "2e-06",
    ]


def test_the_benchmarks_of_this_tree_are_commands(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    assert {"attention", "papers", "quality", "training"} <= set(runner.names())
    assert not {"all", "rows", "results", "training_rank"} & set(runner.names())
    monkeypatch.setattr("sys.argv", ["bench.all", "--only", "papers,warp"])
    with pytest.raises(SystemExit, match="2"):
        runner.main()
    assert "no benchmark is called warp" in capsys.readouterr().err
