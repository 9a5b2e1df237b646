"""The rows of all benchmarks as Markdown, between two marks of docs/results.md, a section for each."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from weft.core.files import whole

BEGIN, END = "<!-- bench -->", "<!-- /bench -->"
SIMULATED = ("papers",)
"""Benchmarks that only simulate; of the others, the rows that say so."""
HEAD = ("case", "measured", "unit", "peer", "limit", "bar", "holds")


def publish(records: Iterable[Mapping[str, Any]], file: Path) -> None:
    """Put each record's section in the place of its last one; the other sections stay as they are."""
    text = file.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    block, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"{file} has no {BEGIN} … {END}, between which the rows go.")
    _, *parts = re.split(r"^### bench\.(\w+)\n", block, flags=re.MULTILINE)
    sections = {name: body.strip() for name, body in zip(parts[::2], parts[1::2], strict=True)}
    for record in records:
        name = record["name"]
        if record["quick"] and name in sections and "--quick" not in sections[name].splitlines()[0]:
            continue
        sections[name] = section(record)
    kept = [re.search(r"(\d+) of (\d+) rows hold", body) for body in sections.values()]
    hold, total = (sum(int(counts[side]) for counts in kept if counts) for side in (1, 2))
    failed = sum(counts is None for counts in kept)
    line = f"{hold} of {total} rows hold" + (f"; {failed} benchmarks failed." if failed else ".")
    body = "\n\n".join([line, *(f"### bench.{name}\n\n{sections[name]}" for name in sorted(sections))])
    with whole(file) as partial:
        partial.write_text(f"{before}{BEGIN}\n{body}\n{END}{after}", encoding="utf-8")


def section(record: Mapping[str, Any]) -> str:
    """When, by which command, on what, and the rows."""
    about = f"`{record['command']}`, {record['date']}, code of {record['commit']}, {record['seconds']} s"
    if record["failed"]:
        return f"{about}: **failed**, {record['failed']}."
    rows = record["rows"]
    kept = sum(row["holds"] for row in rows)
    lines = [f"{about} on {record['machine']}: {kept} of {len(rows)} rows hold.", ""]
    lines += [_line(HEAD), _line(["---"] * len(HEAD))] if rows else []
    return "\n".join([*lines, *(_line(_cells(row, record["name"])) for row in rows)]).rstrip()


def _cells(row: Mapping[str, Any], name: str) -> list[str]:
    simulated = name in SIMULATED or row["case"].startswith("simulated")
    measured = number(row["measured"]) + (" (simulated)" if simulated else "")
    peer = f"{number(row['peer'])} {row['peer_name']}".strip()
    return [
        row["case"], measured, row["unit"], peer, number(row["limit"]), row["bar"],
        "yes" if row["holds"] else "**no**",
    ]  # fmt: skip


def number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
