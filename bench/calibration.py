"""Calibration against itself: three runs of `weft calibrate` on two ranks, number by number.

    python -m bench.calibration [--quick] [--json FILE]

Every run has ranks of its own, as the command has. A number's spread is its largest value over its smallest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.progress import Progress

from bench.rows import Line, Results, Row, main
from weft.core.codec import to_plain
from weft.core.topology import Topology
from weft.run.measure.calibrate import calibrate
from weft.run.spawn.pool import Pool

RUNS, RANKS, SPREAD, SECONDS = 3, 2, 0.10, 60


def numbers(topology: Topology) -> dict[str, float]:
    """Every number of a topology by its name in the TOML."""
    return dict(_flat(to_plain(topology)))


def _flat(plain: dict[str, Any], before: str = "") -> Iterator[tuple[str, float]]:
    for name, value in plain.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield before + name, float(value)


def spread(values: list[float]) -> float:
    if min(values) == max(values):
        return 0.0
    return max(values) / min(values) - 1 if min(values) > 0 else float("inf")


def measure(quick: bool, progress: Progress) -> Results:  # noqa: FBT001 - bench.rows calls it so
    runs, seconds = 2 if quick else RUNS, 0.0
    task = progress.add_task("calibrating", total=runs)
    measurements: list[dict[str, float]] = []
    for _ in range(runs):
        began = time.perf_counter()
        with Pool(RANKS) as pool:
            measurements.append(numbers(pool.run(calibrate)[0]))
        seconds = max(seconds, time.perf_counter() - began)
        progress.advance(task)
    by_name = {name: [each[name] for each in measurements] for name in measurements[0]}
    spreads = {name: spread(values) for name, values in by_name.items()}
    worst = max(spreads, key=lambda name: spreads[name])
    report = Results(
        rows=[
            Row(
                case=f"the number that differs most in {runs} runs: {worst}",
                measured=100 * spreads[worst],
                unit="%",
                bar=f"≤ {SPREAD:.0%}",
                holds=spreads[worst] <= SPREAD,
            ),
            Row(
                case="the slowest run",
                measured=seconds,
                unit="s",
                bar=f"< {SECONDS} s",
                holds=seconds < SECONDS,
            ),
        ]
    )
    for name, values in by_name.items():
        if any(values):
            listed = ", ".join(f"{value:.4g}" for value in values)
            report.lines.append(
                Line(case="spread", name=name, measured=100 * spreads[name], unit="%", note=listed)
            )
    return report


if __name__ == "__main__":
    main(measure, __doc__ or "")
