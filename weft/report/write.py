"""Write a report: a folder with the page, figures, traces and report.json."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from weft import __version__
from weft.core.files import writing
from weft.report.case import Case
from weft.report.cases import report_cases
from weft.report.page import Report, page
from weft.report.perfetto import write_trace
from weft.report.png import render


def write_report(cases: Sequence[Case], folder: Path) -> Path:
    """Write the report on one case, or a comparison of several; return its page."""
    return write(report_cases(cases), folder)


def write(report: Report, folder: Path) -> Path:
    """Write a report and return its page. PNGs need matplotlib."""
    with writing(folder, hint="Give another --out."):
        (folder / "figures").mkdir(parents=True, exist_ok=True)
        traces = [write_trace(timeline, folder / name).name for name, timeline in report.traces.items()]
        for figure in report.figures:
            path = folder / "figures" / figure.name
            path.with_suffix(".svg").write_text(figure.svg(), encoding="utf-8")
            if has_png():
                render(figure, str(path.with_suffix(".png")))
        titles = {figure.name: figure.title for figure in report.figures}
        made = {"weft": __version__, "made": report.made, "command": report.command}
        numbers = {**made, **report.numbers, "missing": report.missing, "figures": titles}
        (folder / "report.json").write_text(json.dumps(numbers, indent=1), encoding="utf-8")
        written = folder / "index.html"
        written.write_text(page(report, traces), encoding="utf-8")
    return written


def has_png() -> bool:
    return find_spec("matplotlib") is not None
