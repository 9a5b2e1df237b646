"""Reports as values, and their page: one self-contained HTML file with the summary table first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from html import escape
from importlib.resources import files
from itertools import groupby
from string import Template
from typing import Any

from weft import __version__
from weft.core.timeline import Timeline
from weft.report.draw import HATCHES, Figure
from weft.report.palette import style_sheet


@dataclass(frozen=True)
class SummaryRow:
    """A row of the summary table: a value per column."""

    label: str
    values: Sequence[str]
    meaning: str = ""
    """The meaning of the number, on the page only."""
    note: str = ""
    """What belongs to this value, on the page and in the terminal."""
    name: str = ""
    """Its key in report.json."""


@dataclass(frozen=True)
class Table:
    """A table below the figures."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    is_open: bool = True
    note: str = ""
    printed: bool = False
    """Whether the terminal shows it too."""


@dataclass(frozen=True)
class Report:
    """What a page shows, what report.json holds, and what the terminal prints."""

    title: str
    about: str
    rows: Sequence[SummaryRow]
    figures: Sequence[Figure]
    missing: Sequence[str]
    """For each figure that cannot be drawn, what it lacks."""
    numbers: Mapping[str, Any]
    columns: Sequence[str] = ()
    """Names of what is compared."""
    verdict: str = ""
    tables: Sequence[Table] = ()
    traces: Mapping[str, Timeline] = field(default_factory=dict[str, Timeline])
    """Timelines by the names of their files."""
    lines: Sequence[str] = ()
    """Text for the terminal."""
    command: str = ""
    """The command line that made it."""
    made: str = field(default_factory=lambda: f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC")


def page(report: Report, traces: Sequence[str] = ()) -> str:
    """Return the HTML of a report; `traces` are the files that were written beside it."""
    codes = " and ".join(f"<code>{escape(name)}</code>" for name in traces)
    every = f"every span: open {codes} in ui.perfetto.dev" if traces else ""
    command = f"<code>{escape(report.command)}</code>" if report.command else ""
    made = f"{report.made}, weft {__version__}"
    return document(
        report.title,
        report.about,
        report.figures,
        report.missing,
        summary=_summary(report),
        verdict=f"<p>{escape(report.verdict)}</p>" if report.verdict else "",
        tables="".join(map(_details, report.tables)),
        footer=" · ".join(filter(None, (command, made, FILES, every))),
    )


FILES = "every number is in <code>report.json</code>, every figure in <code>figures/</code>"


def document(title: str, about: str, figures: Sequence[Figure], missing: Sequence[str], **html: str) -> str:
    """Fill the page template with escaped text and ready-made HTML."""
    template = Template(files("weft.report").joinpath("page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(title),
        about=escape(about),
        colors=style_sheet(),
        hatches=HATCHES,
        figures="\n".join(_figures(figures)),
        missing=f'<p class="note missing">Not drawn: {escape("; ".join(missing))}.</p>' if missing else "",
        **html,
    )


def _summary(report: Report) -> str:
    names = "".join(f"<th>{escape(name).replace('+', '+<wbr>')}</th>" for name in report.columns)
    html = [f"<tr><th></th>{names}<td class='note'></td></tr>"] * bool(report.columns)
    for row in report.rows:
        cells = "".join(f'<td data-name="{row.name}">{escape(value)}</td>' for value in row.values)
        note = escape(row.note or row.meaning)
        html.append(f'<tr><td>{row.label}</td>{cells}<td class="note">{note}</td></tr>')
    return f'<table id="summary">{"".join(html)}</table>'


def _details(table: Table) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    note = f"<p class=note>{escape(table.note)}</p>" if table.note else ""
    return (
        f"<details{' open' * table.is_open}><summary>{escape(table.title)}</summary>"
        f"<div class='scroll'><table><tr>{top}</tr>{body}</table></div>{note}</details>"
    )


def _figures(figures: Sequence[Figure]) -> list[str]:
    """Return the figures as HTML; figures of one group share a slider."""
    html: list[str] = []
    for group, some in groupby(figures, key=lambda figure: figure.group or figure.name):
        one, *others = some
        place = "wide" if one.wide else one.side
        inner = _inner(one)
        if others:
            inner = "".join(
                f"<div data-part{' hidden' * (i > 0)}>{_inner(figure)}</div>"
                for i, figure in enumerate((one, *others))
            )
            inner += f'<input type="range" min="0" max="{len(others)}" value="0" aria-label="{group}">'
        html.append(f"<figure{place and f' class={place}'}>{inner}</figure>")
    return html


def _inner(figure: Figure) -> str:
    return (
        f"<h2>{escape(figure.title)}</h2><div class='scroll'>{figure.svg(alone=False)}</div>"
        f"<figcaption>{escape(figure.caption)}</figcaption>"
    )
