"""The comparison with another commit: matching and arithmetic, and real runs in a small repository."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench import against
from bench import all as runner
from bench.against import ComparisonError, better_of, compare

# Four times `weft.SECONDS`, on a clock that never errs; `{more}` is where a test puts its own.
TINY = """
import json, sys
import weft
rows = [dict(case="run (%d calls)" % weft.CALLS, measured=4 * weft.SECONDS, unit="s", peer=None, peer_name="",
             limit=None, bar="≤ 1", holds=False)]
{more}
if __name__ == "__main__":
    with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
        json.dump(dict(machine="a loom", quick="--quick" in sys.argv, rows=rows, lines=[]), file)
    sys.exit(1)
"""


def row(case: str, measured: float | None, unit: str = "ms", **more: Any) -> dict[str, Any]:
    plain = {"peer": None, "peer_name": "", "limit": None, "bar": "peer/weft ≥ 1.05", "holds": True}
    return {"case": case, "measured": measured, "unit": unit, **plain, **more}


def git(root: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@localhost"]
    done = subprocess.run(["git", *who, *words], cwd=root, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def write(root: Path, seconds: float, *, calls: int = 1, more: str = "") -> None:
    for folder in ("bench", "weft"):
        (root / folder).mkdir(exist_ok=True)
        (root / folder / "__init__.py").write_text("")
    (root / "weft" / "__init__.py").write_text(f"SECONDS = {seconds}\nCALLS = {calls}\n")
    (root / "bench" / "tiny.py").write_text(TINY.format(more=more))


def commit(root: Path) -> str:
    git(root, "add", ".")
    git(root, "commit", "-qm", "a commit")
    return git(root, "rev-parse", "--short", "HEAD")


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit, whose benchmark takes 2 s."""
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(against.signal, "signal", lambda *_: None)  # pytest keeps its own
    root = tmp_path / "root"
    root.mkdir()
    git(root, "init", "-q")
    write(root, 0.5)
    commit(root)
    return root


# Which way is better.


@pytest.mark.parametrize(
    ("better", "found"),
    [
        ("smaller", row("a time, whatever its bar", 1.0, "ms")),
        ("smaller", row("imbalance", 1.0, "‰ of mean load", bar="")),
        ("larger", row("order", 0.9, "Kendall's tau", bar="≥ 0.8")),
        ("smaller", row("moved", 3.0, "%", bar="≤ 5 %")),
        ("larger", row("in time", 82.0, "%", bar="elastic/other ≥ 1.3 (is 4.6, < 9)")),
        ("larger", row("prompts right", 82.0, "%", bar="at least 81.0%, as dense's interval")),
        ("smaller", row("error", 1.2, "×", bar="worst error ≤ 1.5 (is 1.20)")),
        ("?", row("of a paper", 1.2, "s", bar="ratio 1.08", peer_name="published")),
        ("?", row("a new unit", 1.2, "furlongs", bar="")),
    ],
)
def test_better_direction(better: str, found: dict[str, Any]) -> None:
    assert better_of(found) == better


def test_every_unit_of_the_published_rows_has_a_direction() -> None:
    cells = [line.split(" | ") for line in (runner.ROOT / "docs" / "results.md").read_text().splitlines()]
    rows = [cell for cell in cells if len(cell) == 7 and cell[-1].strip(" |") in ("yes", "**no**")]
    units = {cell[2] for cell in rows}
    assert "ms" in units
    assert units - set(against.BETTER_BY_UNIT) <= {"%", "×"}


# Matching and arithmetic.


def test_medians_ratios_and_verdicts() -> None:
    # The medians are equal; two of three rounds say that here is slower.
    rounds = [
        ([row("a", here)], [row("a", there)]) for here, there in ((10.0, 8.0), (20.0, 10.0), (5.0, 10.0))
    ]
    [one], unmatched = compare({"tiny": rounds})
    assert unmatched == []
    assert one.ratio == 1.25 and one.verdict == "worse"
    found = one.row("45b0107")
    assert (found.case, found.measured, found.peer, found.peer_name) == ("tiny: a", 10.0, 10.0, "45b0107")
    assert (found.bar, found.holds) == ("≤ 1.05 ×", False)


@pytest.mark.parametrize(
    ("unit", "here", "there", "ratio", "verdict", "bar"),
    [
        ("ms", 1.04, 1.0, 1.04, "ok", "≤ 1.05 ×"),
        ("ms", 0.5, 1.0, 0.5, "better", "≤ 1.05 ×"),
        ("tokens/s", 0.5, 1.0, 0.5, "worse", "≥ 0.95 ×"),
        ("tokens/s", 0.96, 1.0, 0.96, "ok", "≥ 0.95 ×"),
        ("tokens/s", 2.0, 1.0, 2.0, "better", "≥ 0.95 ×"),
        ("furlongs", 2.0, 1.0, 2.0, "?", ""),
        ("ms", 0.0, 0.0, 1.0, "ok", "≤ 1.05 ×"),
        ("ms", 1.0, 0.0, math.inf, "worse", "≤ 1.05 ×"),
        ("ms", -1.0, 1.0, None, "?", ""),
    ],
)
def test_verdict_by_unit(unit: str, here: float, there: float, ratio: float, verdict: str, bar: str) -> None:
    [one], _ = compare({"tiny": [([row("a", here, unit, bar="")], [row("a", there, unit, bar="")])]})
    assert (one.ratio, one.verdict) == (ratio, verdict)
    found = one.row("1234567")
    assert (found.bar, found.holds) == (bar, verdict != "worse")


def test_rows_match_by_case_unit_and_occurrence() -> None:
    here = [row("a (0.3 GB)", 1.0), row("a", 2.0), row("b", 3.0), row("new", 4.0), row("none", None)]
    there = [row("a (0.4 GB)", 1.0), row("a", 4.0), row("b", 3.0, "s"), row("none", None)]
    matched, unmatched = compare({"tiny": [(here, there)]})
    assert [(one.case, one.here, one.there) for one in matched] == [
        ("a (0.3 GB)", (1.0,), (1.0,)),
        ("a", (2.0,), (4.0,)),
    ]
    assert sorted(unmatched) == ["tiny: b", "tiny: b", "tiny: new"]


def test_one_measurement_next_to_two_peers_counts_once() -> None:
    rows = [row("a", 1.0, peer_name="hand"), row("a", 1.0, peer_name="treadle")]
    matched, unmatched = compare({"tiny": [(rows, rows)]})
    assert len(matched) == 1 and unmatched == []


def test_row_that_a_round_lacks_is_not_compared() -> None:
    matched, unmatched = compare({"tiny": [([row("a", 1.0)], [row("a", 1.0)]), ([], [row("a", 1.0)])]})
    assert (matched, unmatched) == ([], ["tiny: a"])


# Real runs.


def test_two_commits_in_alternating_rounds(
    repository: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(repository, 1.0, calls=2)
    order: list[str] = []
    run_once = against.run_once
    monkeypatch.setattr(
        against,
        "run_once",
        lambda name, side, *a, **k: order.append(side.label) or run_once(name, side, *a, **k),
    )
    report, rev = repository.parent / "report.json", git(repository, "rev-parse", "--short", "HEAD")
    words = ["HEAD", "tiny", "--rounds", "2", "--quick", "--json", str(report)]
    assert against.main(words, repository) == 1  # uncommitted changes are measured
    assert order == ["here", rev, rev, "here"]
    out = capsys.readouterr().out
    assert f"here: weft is {repository / 'weft'}\n" in out and f"{rev}: weft is /" in out
    assert "1 rows: 1 worse by more than 5 %, 0 ok" in out
    [found] = json.loads(report.read_text())["rows"]
    assert found == row("tiny: run (2 calls)", 4.0, "s", peer=2.0, peer_name=rev, bar="≤ 1.05 ×", holds=False)
    assert git(repository, "worktree", "list").count("\n") == 0


def test_new_benchmark_is_skipped_unless_bench_comes_from_here(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "bench" / "tiny.py").rename(repository / "bench" / "fresh.py")
    assert against.main(["HEAD", "tiny", "fresh", "--rounds", "1"], repository) == 2
    out = capsys.readouterr().out
    assert "tiny skipped: not in this tree" in out
    assert "fresh skipped: not in " in out and "try --bench-from-here" in out
    assert against.main(["HEAD", "fresh", "--rounds", "1", "--bench-from-here"], repository) == 0


def test_crash_is_reported_with_its_last_lines(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(repository, 0.5, more="raise ValueError('[warp]')")
    assert against.main(["HEAD", "tiny"], repository) == 2
    out = capsys.readouterr().out
    assert "tiny crashed in here: ended with 1 and no rows" in out and "    ValueError: [warp]\n" in out


def test_tree_that_imports_another_weft_is_refused(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "weft" / "__init__.py").unlink()
    rev = commit(repository)
    write(repository, 0.5)
    with pytest.raises(SystemExit, match="2"):  # the weft that is installed comes first
        against.main([rev, "tiny"], repository)
    assert "must import" in capsys.readouterr().err
    (repository / "bench" / "__init__.py").unlink()
    with pytest.raises(ComparisonError, match="must import"):
        against.imported_weft(repository)
    assert git(repository, "worktree", "list").count("\n") == 0


def test_unknown_names_and_revisions_are_errors(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["HEAD", "warp"], "Unknown benchmark warp; there are tiny."),
        (["no-such", "tiny"], "git rev-parse --verify --short no-such^{commit} failed"),
        (["HEAD", "tiny", "--rounds", "0"], "--rounds must be ≥ 1, got 0"),
    ):
        with pytest.raises(SystemExit, match="2"):
            against.main(words, repository)
        assert message in capsys.readouterr().err


def test_worktree_is_removed_after_an_interrupt(repository: Path) -> None:
    with pytest.raises(KeyboardInterrupt), against.worktree(repository, "HEAD") as tree:
        assert (tree / "weft").is_dir()
        raise KeyboardInterrupt
    assert not tree.parent.exists()
    assert git(repository, "worktree", "list").count("\n") == 0


def test_comparison_is_not_a_benchmark() -> None:
    assert "against" not in runner.names()
