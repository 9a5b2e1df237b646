"""Output of all verbs: tables and notes that fit a terminal and are whole in a pipe, and one live line."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from textwrap import wrap
from typing import Any

import typer

NUMBER = re.compile(r"[-+]?\d[\d,.]*(e[-+]?\d+)?( ?[^\s\d]{1,6}| of \d.*|/[\d.]+)?|[–?]?")
"""A number with its unit, or that there is none: columns of them are right-aligned."""
UNIT = re.compile(r"(?<=\d) (?=[a-zA-Zµ/]{1,7}\b)")
"""Between a number and its unit, where no line is broken."""
MIN_TEXT = 16
"""Columns of the terminal below which text is not wrapped: the table is divided instead."""
COLORS = {"ok": "green", "same": "green", "limited": "yellow", "missing": "red", "DIFFERS": "red"}
"""Colors of cells that are a status."""


Row = Mapping[str, str]

verbosity = 0
"""-1 with --quiet, 1 with --verbose."""
log_level = ""
"""Of --log-level or --verbose; "" is the default of the command."""


class LiveLine:
    """What the command does now: one line on stderr, if that is a terminal, which is replaced and removed."""

    def __init__(self, *, quiet: bool) -> None:
        self._is_shown, self._text = not quiet and verbosity >= 0 and sys.stderr.isatty(), ""

    def update(self, text: str) -> None:
        self._text = text
        if self._is_shown:
            columns = shutil.get_terminal_size().columns
            print(f"\r{text[: columns - 1]}\x1b[K", end="", file=sys.stderr, flush=True)

    def print(self, text: str) -> None:
        """Print a text above the line, to stdout."""
        line = self._text
        self.update("")
        typer.echo(text)
        self.update(line)


@contextmanager
def progress(text: str, *, quiet: bool = False) -> Iterator[LiveLine]:
    """Show what the command does while it does it."""
    line = LiveLine(quiet=quiet)
    line.update(text)
    try:
        yield line
    finally:
        line.update("")


def width() -> int | None:
    """Return the columns of the terminal; None in a pipe, unless COLUMNS is set."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS"):
        return shutil.get_terminal_size().columns
    return None


def note(text: str) -> None:
    """Print a sentence that explains a table, wrapped in a terminal; not with --quiet."""
    if verbosity >= 0:
        typer.echo(paint(fill(text), dim=True))


def fill(text: str) -> str:
    limit = width()
    return text if limit is None else "\n".join("\n".join(_wrapped(line, limit)) for line in text.split("\n"))


def paint(text: str, **style: Any) -> str:
    """Style a text if stdout is a terminal with colors."""
    is_plain = not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return text if is_plain else typer.style(text, **style)


def counted(number: int, noun: str) -> str:
    """
    >>> counted(1, "rank"), counted(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def table(rows: Sequence[Row], *, bold: Collection[int] = (), header: bool = True) -> None:
    """Print rows as a table without borders; their keys are the columns, `bold` are numbers of rows.

    Nothing is cut. A table that is wider than the terminal gets narrow gaps and headers of several lines,
    then wrapped text; at last it is divided, and each part repeats the columns up to the first of text.
    """
    columns = {name: [row[name] for row in rows] for name in rows[0]} if rows else {}
    numbers = {name for name, cells in columns.items() if all(map(NUMBER.fullmatch, cells))}
    for place, (widths, gap) in enumerate(_layouts(columns, numbers, width(), header=header)):
        typer.echo("\n" * (place > 0), nl=False)
        names = {name: wrap(name, widths[name]) or [""] for name in widths}
        height = max(map(len, names.values()), default=0) if header else 0
        for at in range(height):  # headers stand on the rows
            lines = {name: [*[""] * (height - len(words)), *words][at] for name, words in names.items()}
            typer.echo(_line(lines, widths, numbers, gap))
        for number, row in enumerate(rows):
            cells = [_wrapped(row[name], size) for name, size in widths.items()]
            for some in zip_longest(*cells, fillvalue=""):
                line = _line(dict(zip(widths, some, strict=True)), widths, numbers, gap)
                typer.echo(paint(line, bold=True) if number in bold else line)


def _layouts(
    columns: Mapping[str, list[str]], numbers: Collection[str], limit: int | None, *, header: bool
) -> list[tuple[dict[str, int], str]]:
    """Return the widths of the columns of each table that fits, and the gap between them."""
    cells = {name: max(map(len, texts), default=0) for name, texts in columns.items()}
    widths = {name: max(size, len(name) * header) for name, size in cells.items()}
    if limit is None or _total(widths, 2) <= limit:
        return [(widths, "  ")]
    if _total(widths, 1) > limit:
        widths = {name: max(size, *map(len, name.split()), 0) for name, size in cells.items()}
    texts = [name for name in columns if name not in numbers]
    words = {name: [len(word) for cell in columns[name] for word in cell.split()] for name in texts[1:]}
    floors = {name: max(MIN_TEXT, *sizes, 0) for name, sizes in words.items()}
    while _total(widths, 1) > limit and (wide := [name for name in floors if widths[name] > floors[name]]):
        widths[max(wide, key=lambda name: widths[name])] -= 1
    if _total(widths, 1) <= limit:
        return [(widths, " ")]
    labels = (
        {name: widths[name] for name in list(columns)[: 1 + list(columns).index(texts[0])]} if texts else {}
    )
    tables = [dict(labels)]
    for name in list(columns)[len(labels) :]:
        if _total(tables[-1] | {name: widths[name]}, 2) > limit and len(tables[-1]) > len(labels):
            tables.append(dict(labels))
        room = limit - _total(labels, 2) - 2
        tables[-1][name] = min(widths[name], max(MIN_TEXT, room))
    return [(table, "  ") for table in tables]


def _wrapped(text: str, size: int) -> list[str]:
    if len(text) <= size:
        return [text]
    whole = UNIT.sub("\N{NO-BREAK SPACE}", text)
    lines = wrap(whole, size, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in lines]


def _total(widths: Mapping[str, int], gap: int) -> int:
    return sum(widths.values()) + gap * (len(widths) - 1)


def _line(cells: Mapping[str, str], widths: Mapping[str, int], numbers: Collection[str], gap: str) -> str:
    padded = (
        paint(text.rjust(widths[name]) if name in numbers else text.ljust(widths[name]), fg=COLORS.get(text))
        for name, text in cells.items()
    )
    return gap.join(padded).rstrip()
