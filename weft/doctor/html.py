"""The HTML page of a doctor's report: what ran on a GPU for the first time, what holds, and every number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from weft.core import units
from weft.doctor.figures import figures
from weft.doctor.suite import BAD, topology_text
from weft.report.page import document

Report = Mapping[str, Any]
MARKS = {
    "ok": ("✓", "c2", "holds"),
    "wrong": ("✗", "alarm", "wrong numbers"),
    "crashed": ("✗", "alarm", "crashed"),
    "hung": ("✗", "alarm", "hung"),
    "failed": ("✗", "alarm", "failed"),
    "skipped": ("–", "muted", "skipped"),
    "measured": ("·", "ink", ""),
}
UNITS = {
    "seconds": units.time, "predicted_seconds": units.time,
    "bytes": units.size, "predicted_bytes": units.size,
}  # fmt: skip
LABELS = {
    "gbytes_per_s": "GB/s", "microseconds": "µs", "tflops": "TFLOP/s", "torch_tflops": "torch's TFLOP/s",
    "megabytes_sent": "MB sent",
}  # fmt: skip
SEND = (
    "Attach <code>doctor.json</code> to an issue of the kind “A report from a GPU machine”. It has no host "
    "names, user names, paths or addresses. <code>topology.toml</code> is for your plans: <code>weft plan "
    "… --topology topology.toml</code>, or <code>WEFT_TOPOLOGY=topology.toml</code> for all ranks."
)


def page(report: Report) -> str:
    """Return the HTML of a report, one file without external resources."""
    return document(
        title_of(report),
        _about(report),
        figures(report),
        (),
        summary=f"{_marked(report)}<p>{escape(verdict(report))}</p>{_claims(report)}",
        verdict=f'<h2>What was checked</h2><div class="scroll">{_suites(report)}</div>',
        tables="".join(map(_details, report["parts"])) + _topology(report),
        footer=SEND,
    )


def title_of(report: Report) -> str:
    machine = report["machine"]
    names = " and ".join(dict.fromkeys(gpu["name"] for gpu in machine["gpus"])) or "CPUs"
    machines = f", {machine['machines']} machines" if machine["machines"] > 1 else ""
    return f"weft on {machine['ranks']} × {names}{machines}"


def verdict(report: Report) -> str:
    """Return one or two sentences: how many suites hold, and which do not."""
    entries = report["parts"]
    skipped = [entry["name"] for entry in entries if entry["status"] == "skipped"]
    held = sum(entry["status"] == "ok" for entry in entries)
    sentences = [f"{held} of {len(entries)} parts hold."]
    sentences += [f"{entry['name']} {_ending(entry)}." for entry in entries if entry["status"] in BAD]
    if skipped:
        sentences.append(f"Skipped: {', '.join(skipped)}.")
    return " ".join(sentences)


def _ending(entry: Mapping[str, Any]) -> str:
    if entry["status"] == "wrong":
        wrong = [check["name"] for check in entry["checks"] if check["status"] == "wrong"]
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return f"has wrong numbers in {wrong[0]}{more}" if wrong else "has wrong numbers"
    under_way = entry.get("under_way")
    return entry["status"] + (f" in {under_way}" if under_way else "")


def _about(report: Report) -> str:
    machine = report["machine"]
    by_name = {
        "weft": report["weft"], "torch": machine.get("torch"), "CUDA": machine.get("cuda"),
        "NCCL": machine.get("nccl"), "cuDNN": machine.get("cudnn"), "driver": machine.get("driver"),
        "triton": machine.get("triton"), **machine.get("packages", {}),
    }  # fmt: skip
    versions = [f"{name} {version}" for name, version in by_name.items() if version]
    return " · ".join([report["date"], *versions, f"took {units.clock(float(report['seconds']))}"])


def _marked(report: Report) -> str:
    text = ""
    if report.get("made_up"):
        text = "This is a made-up example. None of its numbers was measured."
    elif report["is_rehearsal"]:
        text = "A rehearsal on CPUs. Nothing here ran on a GPU, and times are meaningless."
    return f'<p style="color:var(--alarm);font-weight:600">{text}</p>' if text else ""


def _claims(report: Report) -> str:
    """Return what had never run on a GPU, and the status of each here."""
    rows: list[str] = []
    statuses = {claim: entry["status"] for entry in report["parts"] for claim in entry["claims"]}
    for claim in report["never_ran"]:
        mark, color, word = MARKS[statuses[claim]] if claim in statuses else ("–", "muted", "not checked")
        if report["is_rehearsal"]:
            mark, color, word = "–", "muted", "not run on a GPU"
        rows.append(
            f'<tr><td style="color:var(--{color})">{mark}</td>'
            f'<td style="text-align:left;white-space:normal">{escape(claim)}</td>'
            f'<td style="text-align:left;color:var(--{color})">{word}</td></tr>'
        )
    return f"<h2>What had never run on a GPU before</h2><table>{''.join(rows)}</table>"


def _suites(report: Report) -> str:
    rows = ["<tr><th>part</th><th></th><th>time</th><th>checks</th></tr>"]
    for entry in report["parts"]:
        mark, color, word = MARKS[entry["status"]]
        rows.append(
            f'<tr><td><a href="#{entry["name"]}" style="color:inherit">{escape(entry["name"])}</a></td>'
            f'<td style="text-align:left;color:var(--{color})">{mark} {word}</td>'
            f"<td>{units.time(float(entry['seconds']))}</td><td>{len(entry['checks']) or ''}</td>"
            f'<td class="note">{escape(entry["message"] or entry["title"])}</td></tr>'
        )
    return f"<table>{''.join(rows)}</table>"


def _details(entry: Mapping[str, Any]) -> str:
    """Return every check of a suite; open if something is wrong."""
    is_open = " open" if entry["status"] in BAD else ""
    mark, color, _ = MARKS[entry["status"]]
    message = f"<p>{escape(entry['message'])}</p>" if entry["message"] else ""
    grid, others = _grid(entry["checks"])
    table = f'<div class="scroll"><table>{_checks(others)}</table></div>' if others else ""
    stacks = f'<pre class="scroll">{escape(entry["traceback"])}</pre>' if entry.get("traceback") else ""
    return (
        f'<details id="{entry["name"]}"{is_open}><summary><span style="color:var(--{color})">{mark}</span> '
        f"{escape(entry['title'])}</summary>{message}{grid}{table}{stacks}</details>"
    )


def _grid(checks: Sequence[Mapping[str, Any]]) -> tuple[str, list[Mapping[str, Any]]]:
    """Return the checks of a matrix (dtype · head dim · tiles · direction) as one table, and the others.

    Checks that are wrong, or have more numbers than an error, are among the others too.
    """
    cells: dict[tuple[str, str], dict[tuple[str, str], Mapping[str, Any]]] = {}
    others: list[Mapping[str, Any]] = []
    for check in checks:
        words = check["name"].split(" · ")
        if len(words) == 4:
            cells.setdefault((words[0], words[1]), {})[words[2], words[3]] = check
        if len(words) != 4 or check["status"] == "wrong" or len(check["numbers"]) > 2:
            others.append(check)
    if not cells:
        return "", others
    columns = list(dict.fromkeys(column for row in cells.values() for column in row))
    head = "".join(f"<th>{escape(tiles)}<br>{escape(direction)}</th>" for tiles, direction in columns)
    rows = [f"<tr><th></th>{head}</tr>"]
    for (dtype, head_dim), row in cells.items():
        cells_of_row = "".join(_cell(row.get(column)) for column in columns)
        rows.append(f"<tr><td>{escape(dtype)} · {escape(head_dim)}</td>{cells_of_row}</tr>")
    note = '<p class="note">The largest error against float64; ✗ where it is more than allowed.</p>'
    return f'<div class="scroll"><table>{"".join(rows)}</table></div>{note}', others


def _cell(check: Mapping[str, Any] | None) -> str:
    if check is None:
        return "<td></td>"
    mark, color, _ = MARKS[check["status"]]
    text = _number("error", check["numbers"].get("error")) or escape(check["note"])
    return f'<td style="color:var(--{color})">{mark} {text}</td>'


def _checks(checks: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for check in checks for name in check["numbers"]))
    head = "".join(f"<th>{escape(LABELS.get(name) or name.replace('_', ' '))}</th>" for name in columns)
    rows = [f"<tr><th>check</th><th></th>{head}</tr>"]
    for check in checks:
        mark, color, _ = MARKS[check["status"]]
        cells = "".join(f"<td>{_number(name, check['numbers'].get(name))}</td>" for name in columns)
        rows.append(
            f'<tr><td>{escape(check["name"])}</td><td style="color:var(--{color})">{mark}</td>{cells}'
            f'<td class="note">{escape(check["note"])}</td></tr>'
        )
    return "".join(rows)


def _number(name: str, value: float | str | None) -> str:
    if value is None:
        return ""
    if isinstance(value, str):  # inf and nan, which JSON does not have
        return escape(value)
    if name in UNITS:
        return UNITS[name](value)
    if "error" in name or name == "allowed":
        return f"{value:.1e}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def _topology(report: Report) -> str:
    text = escape(topology_text(report["parts"]))
    return (
        f"<details><summary>topology.toml</summary><pre class='scroll'>{text}</pre></details>" if text else ""
    )
