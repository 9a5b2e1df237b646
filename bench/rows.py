"""What every weft benchmark shares: its rows, how contenders take turns, the command line.

    python -m bench.NAME [--quick] [--json FILE]

A row puts what was measured next to the best peer on the same work in the same run and next to the
limit that no one can beat. The command ends with status 1 if a row does not hold its bar.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table


@dataclass(frozen=True, kw_only=True)
class Row:
    """One question and its answer; `limit` is the bound, `bar` the promise, `holds` whether kept."""

    case: str
    measured: float | None
    unit: str = "ms"
    peer: float | None = None
    peer_name: str = ""
    limit: float | None = None
    bar: str
    holds: bool


@dataclass(frozen=True, kw_only=True)
class Line:
    """One contender of one case, printed beneath the rows; None where there is no number."""

    case: str
    name: str
    measured: float | None = None
    quartiles: tuple[float, float] | None = None
    cpu: float | None = None
    ratio: float | None = None
    unit: str = "ms"
    note: str = ""


@dataclass(frozen=True)
class Results:
    rows: list[Row] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)


class Took(NamedTuple):
    """Seconds of one turn; `cpu` counts all threads of this process and survives a busy machine."""

    wall: float
    cpu: float


Contenders = Mapping[str, Callable[[], object]]


def take_turns(
    contenders: Contenders, turn: int, before: Callable[[], object] = lambda: None
) -> dict[str, Took]:
    """One round: each contender once, in an order that turns by one place with every round.

    So no contender always follows the same one, and what disturbs the machine for longer than a
    turn disturbs all of them. `before` runs ahead of each clock, such as a barrier.
    """
    names = list(contenders)
    first = turn % len(names)
    took: dict[str, Took] = {}
    gc.collect()
    gc.disable()
    try:
        for name in names[first:] + names[:first]:
            before()
            wall, cpu = time.perf_counter(), time.process_time()
            result = contenders[name]()
            took[name] = Took(time.perf_counter() - wall, time.process_time() - cpu)
            del result  # what a contender returns is freed outside its time
    finally:
        gc.enable()
    return took


class Round(NamedTuple):
    took: dict[str, Took]  # by the slowest rank
    others: float  # the share of the machine that other processes had
    spent: float  # seconds since the first round began


QUIET = 0.05
LEAST, MOST = 3, 60


def interleave(
    play: Callable[[int], Sequence[dict[str, Took]]], seconds: float, least: int = LEAST, most: int = MOST
) -> Iterator[Round]:
    """Rounds until the time is spent. `play(turn)` has every rank take its turns.

    In one process, `play` is `lambda turn: [take_turns(contenders, turn)]`.
    """
    cores = os.cpu_count() or 1
    began = time.monotonic()
    spent = 0.0
    for turn in range(most):
        before, busy = spent, busy_seconds()
        ranks = play(turn)
        spent = time.monotonic() - began
        own = sum(took.cpu for rank in ranks for took in rank.values())
        others = max(0.0, busy_seconds() - busy - own) / (spent - before) / cores
        took = {name: _slowest([rank[name] for rank in ranks]) for name in ranks[0]}
        yield Round(took, others, spent)
        if turn + 1 >= least and spent * (turn + 2) / (turn + 1) > seconds:
            return


def _slowest(ranks: Sequence[Took]) -> Took:
    return Took(max(took.wall for took in ranks), max(took.cpu for took in ranks))


def followed(rounds: Iterable[Round], progress: Progress, task: TaskID) -> list[Round]:
    """The rounds, one after the other; the bar of a task, whose total is their seconds, goes along."""
    ordered: list[Round] = []
    for played in rounds:
        ordered.append(played)
        progress.update(task, completed=played.spent)
    return ordered


def undisturbed(rounds: Sequence[Round]) -> Sequence[Round]:
    """The rounds in which others had little of the machine; all, if that would leave too few."""
    quiet = [played for played in rounds if played.others <= QUIET]
    return quiet if len(quiet) >= LEAST else rounds


def busy_seconds() -> float:
    """CPU seconds of this machine so far, all processes and what a hypervisor took; 0 if unknown."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _idle, _wait, *rest = map(int, stat.read_text().split("\n")[0].split()[1:])
    return (user + nice + system + sum(rest[:3])) / os.sysconf("SC_CLK_TCK")


def walls(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """By contender, milliseconds of each round."""
    return {name: [played.took[name].wall * 1e3 for played in rounds] for name in rounds[0].took}


def timed(case: str, name: str, rounds: Sequence[Round], against: str, note: str = "") -> Line:
    """The line of a contender; its ratio is to the times of the one that it stands against."""
    wall = walls(rounds)
    return Line(
        case=case,
        name=name,
        measured=statistics.median(wall[name]),
        quartiles=quartiles(wall[name]),
        cpu=statistics.median(played.took[name].cpu * 1e3 for played in rounds),
        ratio=median_ratio(wall[name], wall[against]),
        note=note,
    )


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """The median of the ratios of each round: a slow spell weighs on both sides of its ratio."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, high


def main(measure: Callable[[bool, Progress], Results], about: str) -> None:
    """The command line of a benchmark: `measure(quick, progress)` does the work."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases and rounds, under 50 s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows to FILE")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended too
    console = Console()
    began = time.time()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        report = measure(options.quick, progress)
    show(report, console)
    console.print(f"{time.time() - began:.0f} s on {machine()}", style="dim", highlight=False)
    if options.json:
        write_json(report, options.json, quick=options.quick)
    sys.exit(0 if all(row.holds for row in report.rows) else 1)


def show(report: Results, console: Console) -> None:
    rows = Table("case", "unit", *(_right(n) for n in ("measured", "peer")), "fastest peer")
    rows.add_column("limit", justify="right")
    rows.add_column("of limit", justify="right")
    rows.add_column("bar")
    rows.add_column("holds")
    for row in report.rows:
        reached = row.limit / row.measured if row.limit and row.measured else None
        cells = (_number(row.measured), _number(row.peer), row.peer_name, _number(row.limit))
        share = "" if reached is None else f"{reached:.0%}"
        verdict = "[green]yes" if row.holds else "[red]no"
        rows.add_row(row.case, row.unit, *cells, share, row.bar, verdict)
    console.print(rows)
    if report.lines:
        console.print(_lines_table(report.lines))


def _lines_table(lines: Iterable[Line]) -> Table:
    names = ("measured", "middle half", "cpu/rank", "peer/weft")
    table = Table("case", "contender", *(_right(name) for name in names), "")
    before = None
    for line in lines:
        if before is not None and line.case != before:
            table.add_section()
        spread = "" if line.quartiles is None else " - ".join(map(_number, line.quartiles))
        numbers = (_number(line.measured), spread, _number(line.cpu), _number(line.ratio, 3))
        table.add_row("" if line.case == before else line.case, line.name, *numbers, line.note)
        before = line.case
    return table


def _right(name: str) -> Column:
    return Column(name, justify="right")


def _number(value: float | None, digits: int = 1) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def write_json(report: Results, file: Path, *, quick: bool) -> None:
    content = {
        "machine": machine(),
        "quick": quick,
        "rows": [asdict(row) for row in report.rows],
        "lines": [asdict(line) for line in report.lines],
    }
    file.write_text(json.dumps(content, indent=2) + "\n")


def machine() -> str:
    """What a reader needs to judge the numbers, the load of others on the machine among it."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    return f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}"
