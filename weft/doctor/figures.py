"""Figures of a doctor's report: bandwidth by pair, kernel speeds, and predictions beside measurements."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from weft.core import units
from weft.report.draw import Figure, Label, Polyline, Rect, Shape

Report = Mapping[str, Any]
WIDTH, WIDE, LEFT, TOP, SIDE = 480.0, 960.0, 92.0, 46.0, 300.0
BAR, GAP = 15.0, 9.0
PAIR = re.compile(r"(\d+)→(\d+)")
MAX_SPEEDS = 24


def figures(report: Report) -> list[Figure]:
    drawn = (_links(report), _predictions(report), _speeds(report))
    return [figure for figure in drawn if figure is not None]


def checks_of(report: Report, name: str) -> Sequence[Mapping[str, Any]]:
    """Return the checks of a suite."""
    return next((entry["checks"] for entry in report["parts"] if entry["name"] == name), ())


def _links(report: Report) -> Figure | None:
    """Draw GB/s by pair, from zero to the fastest."""
    speeds = {
        (int(pair[1]), int(pair[2])): float(check["numbers"]["gbytes_per_s"])
        for check in checks_of(report, "links")
        if (pair := PAIR.fullmatch(check["name"])) and "gbytes_per_s" in check["numbers"]
    }
    if not speeds:
        return None
    speeds = {(b, a): speed for (a, b), speed in speeds.items()} | speeds  # both ways were measured at once
    ranks = 1 + max(max(pair) for pair in speeds)
    fastest, cell = max(speeds.values()), SIDE / ranks
    shapes: list[Shape] = [Rect(LEFT, TOP, SIDE, SIDE, "panel")]
    for (a, b), speed in speeds.items():
        x, y, tip = LEFT + b * cell, TOP + a * cell, f"rank {a} → rank {b}: {speed:,.1f} GB/s"
        shapes.append(Rect(x, y, cell, cell, "c4", speed / fastest, "link", tip))
        if ranks <= 8:
            color = "white" if speed > 0.55 * fastest else "ink"
            shapes.append(Label(x + cell / 2, y + cell / 2 + 4, _gbytes(speed), 12, color, "middle"))
    for rank in range(0, ranks, -(-ranks // 8)):
        shapes.append(Label(LEFT - 6, TOP + (rank + 0.5) * cell + 4, str(rank), 12.5, anchor="end"))
        shapes.append(Label(LEFT + (rank + 0.5) * cell, TOP - 6, str(rank), 12.5, anchor="middle"))
    shapes.append(Label(LEFT - 34, TOP + SIDE / 2 + 4, "from", 12.5, anchor="end"))
    shapes.append(Label(LEFT + SIDE / 2, TOP - 26, "to rank", 12.5, anchor="middle"))
    slowest = min(speeds.values())
    title = f"Links: {_gbytes(slowest)} to {_gbytes(fastest)} GB/s between two ranks"
    caption = "GB/s of each direction while both send. Color begins at zero."
    return Figure("links", title, WIDTH, TOP + SIDE + 12, tuple(shapes), caption=caption)


def _gbytes(speed: float) -> str:
    return f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}"


def _predictions(report: Report) -> Figure | None:
    """Draw two bars for each measurement of the Wan-shaped attention that was also predicted."""
    pairs = list(_predicted(checks_of(report, "wan")))
    if not pairs:
        return None
    shapes: list[Shape] = []
    left, right, y = 40.0, 340.0, 18.0
    for name, measured, predicted, show in pairs:
        shapes.append(Label(left, y, name, 12.5, "ink"))
        most = max(measured, predicted)
        for value, color, label in ((measured, "c4", "measured"), (predicted, "c7", "predicted")):
            y += 6
            width = (right - left) * value / most
            shapes.append(Rect(left, y, width, BAR, color, kind=label))
            shapes.append(Label(left + width + 6, y + BAR - 3, f"{show(value)} {label}", 12.5))
            y += BAR
        y += 22
    title = "One attention of Wan: measured and predicted"
    return Figure("wan", title, WIDTH, y, tuple(shapes), caption="Each pair on a scale of its own.")


def _predicted(checks: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, float, float, Any]]:
    for check in checks:
        numbers = check["numbers"]
        for name, show in (("seconds", units.time), ("bytes", units.size)):
            if numbers.get(f"predicted_{name}") and name in numbers:
                yield check["name"], float(numbers[name]), float(numbers[f"predicted_{name}"]), show


def _speeds(report: Report) -> Figure | None:
    """Draw TFLOP/s of each kernel that was timed, with a mark at torch's own dense attention."""
    rows = [
        (entry["name"].removeprefix("kernel-"), check)
        for entry in report["parts"]
        if entry["name"].startswith("kernel-")
        for check in entry["checks"]
        if check["numbers"].get("tflops")
    ][:MAX_SPEEDS]
    if not rows:
        return None
    left, right, y = 390.0, 890.0, 8.0
    most = max(max(check["numbers"]["tflops"], check["numbers"].get("torch_tflops", 0)) for _, check in rows)
    shapes: list[Shape] = []
    for backend, check in rows:
        speed, own = check["numbers"]["tflops"], check["numbers"].get("torch_tflops")
        width = (right - left) * speed / most
        shapes.append(Label(left - 10, y + BAR - 3, f"{backend} · {check['name']}", 12.5, "ink", "end"))
        shapes.append(Rect(left, y, width, BAR, "c4", kind="speed"))
        shapes.append(Label(left + width + 8, y + BAR - 3, f"{speed:,.0f}", 12.5))
        if own:
            at = left + (right - left) * own / most
            shapes.append(Polyline(((at, y - 3), (at, y + BAR + 3)), "c5", 2.5, kind="torch"))
        y += BAR + GAP
    title = f"Kernels: up to {max(check['numbers']['tflops'] for _, check in rows):,.0f} TFLOP/s"
    caption = "TFLOP/s over active tiles. The upright mark is torch's own dense attention at the same shape."
    return Figure("kernels", title, WIDE, y + 4, tuple(shapes), caption=caption, wide=True)
