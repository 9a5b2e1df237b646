"""Compare this tree with another commit: run the same benchmarks on both, in alternating rounds.

    python -m bench.against REV NAME… [--rounds N] [--quick] [--bench-from-here] [--json FILE]

REV is checked out in a temporary worktree and run with this interpreter. Each round runs the benchmark once
on each side, in a process of its own. A row's ratio is the median over rounds of here / there, so that a slow
spell of the machine weighs on both sides. Uncommitted changes of this tree are measured too.

Exit status: 1 if a row is worse by more than 5 %, 2 if a benchmark crashed or nothing was compared.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from bench.all import ROOT, names, record_file, run, state
from bench.results import number
from bench.rows import Results, Row, write_json

TOLERANCE = 0.05
TAIL_LINES = 8
SMALLER, LARGER, UNKNOWN = "smaller", "larger", "?"
BETTER_BY_UNIT = {
    **dict.fromkeys(("s", "ms", "µs", "ns", "B", "MB", "GB", "% of the step", "‰ of mean load"), SMALLER),
    **dict.fromkeys(("Kendall's tau", "tokens/s", "requests/s", "GB/s", "GFLOP/s", "TFLOP/s"), LARGER),
}
"""Which measurements are better. The bar does not decide here: "peer/weft ≥ 1.05" is a bar of times too."""
BETTER_BY_BAR = {"≤": SMALLER, "<": SMALLER, "≥": LARGER, ">": LARGER, "at least": LARGER}
"""For units that say nothing, such as % and ×: the first of these signs in the bar decides."""
STYLES = {"worse": "bold red", "better": "green", "ok": "", UNKNOWN: "dim"}

Rows = Sequence[Mapping[str, Any]]


class ComparisonError(Exception):
    """The comparison cannot start, or a benchmark ended without rows."""


class Checkout(NamedTuple):
    label: str  # "here", or a short hash
    root: Path


def better_of(row: Mapping[str, Any]) -> str:
    """Return whether smaller or larger measurements of this row are better, or "?"."""
    if row["peer_name"] == "published":  # a simulation beside a paper's number: near it is better
        return UNKNOWN
    signs = re.findall("|".join(BETTER_BY_BAR), row["bar"])
    return BETTER_BY_UNIT.get(row["unit"]) or (BETTER_BY_BAR[signs[0]] if signs else UNKNOWN)


def index_rows(rows: Rows) -> dict[tuple[str, str, int], Mapping[str, Any]]:
    """Index the measured rows by case, unit and occurrence.

    Some cases carry a result in parentheses, such as "(0.3 GB)", which differs between runs: it is not part
    of the key. Some cases occur several times, once for each peer.
    """
    seen: Counter[tuple[str, str]] = Counter()
    indexed: dict[tuple[str, str, int], Mapping[str, Any]] = {}
    for row in rows:
        same = re.sub(r"\s*\([^)]*\d[^)]*\)", "", row["case"]), row["unit"]
        if row["measured"] is not None:
            indexed[(*same, seen[same])] = row
        seen[same] += 1
    return indexed


class RowComparison(NamedTuple):
    """One row of a benchmark on both sides, a measurement of each for every round."""

    benchmark: str
    case: str
    unit: str
    better: str
    here: tuple[float, ...]
    there: tuple[float, ...]

    @property
    def ratio(self) -> float | None:
        """The median over rounds of here / there; None if a value is below zero."""
        if min(*self.here, *self.there) < 0:
            return None
        pairs = zip(self.here, self.there, strict=True)
        return median(1.0 if a == b else a / b if b else math.inf for a, b in pairs)

    @property
    def verdict(self) -> str:
        ratio = self.ratio
        if self.better == UNKNOWN or ratio is None:
            return UNKNOWN
        gain = 1 - ratio if self.better == SMALLER else ratio - 1
        return "worse" if gain < -TOLERANCE else "better" if gain > TOLERANCE else "ok"

    def row(self, there: str) -> Row:
        bar = f"≤ {1 + TOLERANCE:g} ×" if self.better == SMALLER else f"≥ {1 - TOLERANCE:g} ×"
        judged = {"bar": "" if self.verdict == UNKNOWN else bar, "holds": self.verdict != "worse"}
        both = {"measured": median(self.here), "peer": median(self.there), "peer_name": there}
        return Row(case=f"{self.benchmark}: {self.case}", unit=self.unit, **both, **judged)


def compare(played: Mapping[str, Sequence[tuple[Rows, Rows]]]) -> tuple[list[RowComparison], list[str]]:
    """Match the rows of both sides, given (here, there) of each round of each benchmark.

    Return the rows that every round has on both sides, and the cases of all others. A measurement that stands
    in several rows, next to several peers, is returned once.
    """
    matched: list[RowComparison] = []
    unmatched: list[str] = []
    for benchmark, rounds in played.items():
        sides = [index_rows(rows) for pair in rounds for rows in pair]
        for key, row in {key: row for side in reversed(sides) for key, row in side.items()}.items():
            if all(key in side for side in sides):
                here, there = (tuple(side[key]["measured"] for side in sides[first::2]) for first in (0, 1))
                one = RowComparison(benchmark, row["case"], row["unit"], better_of(row), here, there)
                matched += [one] if one not in matched else []
            else:
                unmatched.append(f"{benchmark}: {row['case']}")
    return matched, unmatched


def git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ComparisonError(f"git {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


@contextmanager
def worktree(root: Path, commit: str) -> Iterator[Path]:
    """Check out `commit` in a temporary folder, which is removed however the block ends."""
    try:
        with tempfile.TemporaryDirectory(prefix="bench-against-") as folder:
            tree = Path(folder).resolve() / "tree"
            git(root, "worktree", "add", "--detach", str(tree), commit)
            if (root.parent / "shared").exists():  # bench.planner reads ../shared/data
                (tree.parent / "shared").symlink_to(root.parent / "shared")
            yield tree
    finally:
        git(root, "worktree", "prune")  # the folder is gone: its entry goes too


@contextmanager
def python_path(root: Path) -> Iterator[None]:
    """Put `root` first on the path of all processes that are started, ahead of an editable install."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), before]))
    try:
        yield
    finally:
        os.environ["PYTHONPATH"] = before


def imported_weft(root: Path) -> Path:
    """Return the weft that benchmarks of `root` import; raise if it or their `bench` is not in `root`."""
    code = "import bench, weft; print(bench.__file__, weft.__file__, sep='\\n')"
    with python_path(root):
        done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise ComparisonError(f"{root} must import weft and bench: {done.stderr.strip().splitlines()[-1]}")
    for name, file in zip(("bench", "weft"), done.stdout.splitlines(), strict=True):
        if Path(file).resolve().parent != root.resolve() / name:
            raise ComparisonError(f"{root} must import its own {name}, got {file}: an installed one wins.")
    return root / "weft"


def choose(asked: Sequence[str], here: Checkout, there: Checkout) -> tuple[list[str], list[str]]:
    """Return the benchmarks that both sides have, and a message for each of the others."""
    ours, theirs = names(here.root), names(there.root)
    if strange := [name for name in asked if name not in {*ours, *theirs}]:
        raise ComparisonError(f"Unknown benchmark {', '.join(strange)}; there are {', '.join(ours)}.")
    hints = {True: f"not in {there.label}; try --bench-from-here", False: "not in this tree"}
    both = [name for name in asked if name in ours and name in theirs]
    return both, [f"{name} skipped: {hints[name in ours]}" for name in asked if name not in both]


def run_once(name: str, side: Checkout, logs: Path, *, quick: bool) -> Rows:
    """Return the rows of one run. A row that misses its bar is no failure here."""
    with python_path(side.root):
        record = run(name, logs, quick=quick, root=side.root)
    if record["failed"]:
        log = record_file(logs, name, quick=quick).with_suffix(".log").read_text(errors="replace")
        last = "\n".join(f"    {line}" for line in log.splitlines()[-TAIL_LINES:])
        raise ComparisonError(f"{name} crashed in {side.label}: {record['failed']}. Its last lines:\n{last}")
    return record["rows"]


def measure(
    chosen: Sequence[str], sides: tuple[Checkout, Checkout], rounds: int, *, quick: bool
) -> tuple[dict[str, list[tuple[Rows, Rows]]], list[str]]:
    """Return (here, there) of each round of each benchmark, and a message for each crash.

    A benchmark that crashed is not run again; its whole rounds before that count.
    """
    played: dict[str, list[tuple[Rows, Rows]]] = {name: [] for name in chosen}
    crashes: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    with progress, tempfile.TemporaryDirectory() as logs:
        task = progress.add_task("", total=2 * rounds * len(chosen))
        for place, name in enumerate(chosen):
            try:
                for turn in range(rounds):
                    rows: dict[Checkout, Rows] = {}
                    for side in sides if turn % 2 == 0 else sides[::-1]:  # neither side is always first
                        progress.update(task, description=f"{name}, round {turn + 1}: {side.label}")
                        rows[side] = run_once(name, side, Path(logs), quick=quick)
                        progress.advance(task)
                    played[name].append((rows[sides[0]], rows[sides[1]]))
            except ComparisonError as crash:
                crashes.append(str(crash))
                progress.update(task, completed=2 * rounds * (place + 1))
    return played, crashes


def show(comparisons: Sequence[RowComparison], there: str, console: Console) -> None:
    """Print one row for each comparison, and how many there are of each verdict."""
    numbers = (Column(name, justify="right", no_wrap=True) for name in ("here", there, "ratio"))
    # No frame: at 80 columns the cases need the room.
    table = Table("benchmark", "case", *numbers, "verdict", box=box.SIMPLE, pad_edge=False)
    for one in comparisons:
        ratio = "" if one.ratio is None else f"{one.ratio:.3f}"
        cells = (number(median(one.here)), number(median(one.there)), ratio, one.verdict)
        table.add_row(one.benchmark, Text(f"{one.case} [{one.unit}]"), *cells, style=STYLES[one.verdict])
    if comparisons:
        console.print(table)
    counts, percent = Counter(one.verdict for one in comparisons), f"{100 * TOLERANCE:g} %"
    console.print(
        f"{len(comparisons)} rows: {counts['worse']} worse by more than {percent}, {counts['ok']} ok, "
        f"{counts['better']} better by more than {percent}, {counts[UNKNOWN]} not judged"
    )


def against(options: argparse.Namespace, root: Path = ROOT) -> int:
    """Compare and print; return the exit status."""
    console = Console(highlight=False)
    commit = git(root, "rev-parse", "--verify", "--short", f"{options.rev}^{{commit}}")
    with worktree(root, commit) as tree:
        if options.bench_from_here:
            shutil.copytree(root / "bench", tree / "bench", dirs_exist_ok=True)
        here, there = Checkout("here", root), Checkout(commit, tree)
        chosen, notes = choose(list(dict.fromkeys(options.names)), here, there)
        measured_state = state(root)
        for side in (here, there):
            console.print(f"{side.label}: weft is {imported_weft(side.root)}", soft_wrap=True, markup=False)
        played, crashes = measure(chosen, (here, there), options.rounds, quick=options.quick)
        if state(root) != measured_state:
            notes.append("The code of this tree changed during the run: its rounds are of different code.")
    comparisons, unmatched = compare(played)
    show(comparisons, commit, console)
    for note in (*notes, *(f"Not in every run of both sides: {case}" for case in unmatched), *crashes):
        console.print(note, markup=False, soft_wrap=True)
    if options.json:
        write_json(Results([one.row(commit) for one in comparisons]), options.json, quick=options.quick)
    worse = any(one.verdict == "worse" for one in comparisons)
    return 1 if worse else 2 if crashes or not comparisons else 0


def main(words: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rev", metavar="REV", help="the commit to compare with")
    parser.add_argument("names", metavar="NAME", nargs="+", help="benchmarks, such as planner")
    parser.add_argument("--rounds", type=int, default=4, help="runs on each side; even numbers are fair")
    parser.add_argument("--quick", action="store_true", help="every benchmark with --quick")
    parser.add_argument("--bench-from-here", action="store_true", help="measure REV with this tree's bench/")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args(words)
    if options.rounds < 1:
        parser.error(f"--rounds must be ≥ 1, got {options.rounds}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the worktree is removed then too
    try:
        return against(options, root)
    except ComparisonError as error:
        parser.exit(2, f"{error}\n")
    except KeyboardInterrupt:
        parser.exit(130, "Interrupted; the worktree is removed.\n")


if __name__ == "__main__":
    sys.exit(main())
