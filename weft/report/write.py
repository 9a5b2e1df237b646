"""Write a report: a folder with the page, figures, trace and report.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from weft import __version__
from weft.core.files import writing
from weft.core.schedule import Schedule
from weft.report.bars import load_bars, memory_bars
from weft.report.case import Case, numbers
from weft.report.curves import roofline, scaling_curve
from weft.report.draw import Figure
from weft.report.gantt import gantt
from weft.report.learning import draw_runs
from weft.report.mask_figure import mask_figure, shown_heads
from weft.report.page import page, run_page
from weft.report.perfetto import write_trace
from weft.report.png import render
from weft.report.traffic import traffic_matrix
from weft.report.trained import summary
from weft.report.training import Run

MASK_BYTES = 400_000
"""Maximum pixels of mask images, which do not compress, so that the page stays below 2 MB."""
KINDS = ("mask", "loads", "traffic", "memory", "scaling", "roofline")


def write_report(cases: Sequence[Case], folder: Path) -> Path:
    """Write one case, or a comparison of two; return the page. PNGs need matplotlib."""
    figures, missing = draw(cases)
    with _writable(folder):
        names = ["trace.json"] if len(cases) == 1 else ["trace-a.json", "trace-b.json"]
        traces = [
            write_trace(case.traced or case.timeline, folder / name).name
            for case, name in zip(cases, names, strict=True)
        ]
        known = {"cases": [numbers(case) for case in cases], "missing": missing}
        return _save(folder, figures, known, page(cases, figures, missing, traces))


def write_runs(runs: Sequence[Run], folder: Path) -> Path:
    """Write one training run, or a comparison of several; return the page."""
    figures, missing = draw_runs(runs)
    with _writable(folder):
        known = {"runs": [{"name": run.name} | summary(run) for run in runs], "missing": missing}
        return _save(folder, figures, known, run_page(runs, figures, missing))


def _save(folder: Path, figures: Sequence[Figure], known: Mapping[str, Any], html: str) -> Path:
    for figure in figures:
        path = folder / "figures" / figure.name
        path.with_suffix(".svg").write_text(figure.svg(), encoding="utf-8")
        if has_png():
            render(figure, str(path.with_suffix(".png")))
    numbers = {"weft": __version__, **known, "figures": {figure.name: figure.title for figure in figures}}
    (folder / "report.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
    written = folder / "index.html"
    written.write_text(html, encoding="utf-8")
    return written


@contextmanager
def _writable(folder: Path) -> Iterator[None]:
    with writing(folder, hint="Give another --out."):
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        yield


def has_png() -> bool:
    return find_spec("matplotlib") is not None


def draw(cases: Sequence[Case]) -> tuple[list[Figure], list[str]]:
    """Return the figures that can be drawn, and for each other one what it lacks."""
    own = [_own(case) for case in cases]
    if len(cases) == 1:
        return [gantt(cases), *own[0][0]], own[0][1]
    (first, lacks), (second, also) = own
    both = {_kind(figure) for figure in first} & {_kind(figure) for figure in second}
    pairs = [
        _of(figure, case, letter, paired=_kind(figure) in both)
        for case, letter, figures in zip(cases, "ab", (first, second), strict=True)
        for figure in figures
    ]
    # Pairs of the same figure of both cases first, then figures that only one case has.
    pairs.sort(key=lambda figure: (not figure.side, KINDS.index(_kind(figure))))
    if lacks == also:
        return [gantt(cases), *pairs], lacks
    named = [f"{case.name}: {', '.join(some)}" for case, (_, some) in zip(cases, own, strict=True) if some]
    return [gantt(cases), *pairs], named


def _kind(figure: Figure) -> str:
    return figure.name.partition("-")[0]


def _own(case: Case) -> tuple[list[Figure], list[str]]:
    figures: list[Figure] = []
    missing: list[str] = []
    if case.schedule:
        figures += _masks(case, case.schedule)
    else:
        missing.append("masks and the roofline (they need schedule.json beside the trace)")
    figures.append(load_bars(case))
    figures.append(traffic_matrix(case))
    if case.memory:
        figures.append(memory_bars(case))
    else:
        missing.append("memory (it is not in the trace)")
    if len({point.gpus for point in case.scaling if point.seconds}) > 1:
        figures.append(scaling_curve(case.scaling))
    else:
        missing.append("the scaling curve (it needs a simulated cluster of several GPUs)")
    if case.schedule and case.topology and case.traffic.any():
        figures.append(roofline(case, case.topology))
    elif case.schedule:
        missing.append("the roofline (it needs --topology, and something that is sent)")
    return figures, missing


def _masks(case: Case, schedule: Schedule) -> list[Figure]:
    """Return the mask figures of as many heads as the page has room for."""
    figures: list[Figure] = []
    for head in shown_heads(schedule):
        figures.append(mask_figure(case, schedule, head))
        if sum(len(figure.svg(alone=False)) for figure in figures) > MASK_BYTES:
            break
    return figures


def _of(figure: Figure, case: Case, letter: str, *, paired: bool) -> Figure:
    group = figure.group and f"{figure.group}-{letter}"
    name, title = f"{figure.name}-{letter}", f"{case.name} · {figure.title}"
    return replace(figure, name=name, title=title, group=group, side=letter if paired else "")
