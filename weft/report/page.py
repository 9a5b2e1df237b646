"""Render a report as one self-contained HTML file, with the summary table first."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from itertools import groupby
from string import Template

from weft import __version__
from weft.core import units
from weft.report import trained
from weft.report.case import Case, numbers, summary
from weft.report.draw import HATCHES, Figure
from weft.report.palette import style_sheet
from weft.report.training import Run

MEANINGS = {
    "seconds": ("time", "until the last rank is done"),
    "compute": ("compute", "of the time, the mean rank attends or copies"),
    "exposed": ("exposed communication", "of the time, it waits for data: transfers that nothing hides"),
    "idle": ("idle", "of the time, it has nothing left or nothing yet to do"),
    "overlap": ("overlap", "of the sending, the sender computes meanwhile"),
    "imbalance": ("imbalance in time", "the busiest rank computes so many times as long as the mean"),
    "slowest": ("slowest rank", "is done last"),
}
MOST_ROWS = 64


def page(
    cases: Sequence[Case], figures: Sequence[Figure], missing: Sequence[str], traces: Sequence[str]
) -> str:
    """Return the HTML of a report on one case, or a comparison of two."""
    return document(
        " against ".join(case.name for case in cases),
        " — ".join(dict.fromkeys(map(_about, cases))),
        figures,
        missing,
        summary=_summary(cases),
        verdict=f"<p>{escape(verdict(cases))}</p>",
        tables=_plans(cases) + "".join(_layer_plans(case) + _ranks(case) for case in cases),
        footer=f"{FOOTER} · every span: open {_codes(traces)} in ui.perfetto.dev",
    )


def run_page(runs: Sequence[Run], figures: Sequence[Figure], missing: Sequence[str]) -> str:
    """Return the HTML of a report on one or several training runs."""
    tables = [trained.rows(run) for run in runs]
    labels = list(dict.fromkeys(label for some in tables for label, _, _ in some))
    known = [{label: value for label, value, _ in some} for some in tables]
    meaning = {label: text for label, _, text in tables[0]} if len(runs) == 1 else {}
    head = "".join(f"<th>{escape(run.name)}</th>" for run in runs)
    body = [f"<tr><th></th>{head}</tr>"] * (len(runs) > 1)
    for label in labels:
        cells = "".join(f"<td>{escape(one.get(label, '–'))}</td>" for one in known)
        body.append(f'<tr><td>{label}</td>{cells}<td class="note">{escape(meaning.get(label, ""))}</td></tr>')
    return document(
        " against ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} training runs",
        " — ".join(dict.fromkeys(map(trained.about, runs))),
        figures,
        missing,
        summary=f'<table id="summary">{"".join(body)}</table>',
        verdict=f"<p>{escape(trained.verdict(runs[0]))}</p>" if len(runs) == 1 else "",
        tables="".join(_layers(run) for run in runs if run.layers),
        footer=FOOTER,
    )


def _layers(run: Run) -> str:
    table = _table(*trained.layer_rows(run))
    return f"<details open><summary>Layers of {escape(run.name)}, now</summary>{table}</details>"


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


FOOTER = (
    f"weft {__version__} · every number is in <code>report.json</code>, every figure in <code>figures/</code>"
)


def _about(case: Case) -> str:
    parts = [case.source]
    if where := case.topology.name if case.topology else case.timeline.topology:
        parts.append(f"on {where}")
    machines = f" on {case.machines} machines" if case.machines > 1 else ""
    parts.append(f"{case.ranks} rank{'s' * (case.ranks != 1)}{machines}")
    if case.schedule:
        problem, mask = case.schedule.attention
        parts.append(
            f"{problem.q.size:,} tokens, {problem.heads} heads × {problem.head_dim}, {problem.dtype}"
        )
        parts.append(f"{mask.density:.0%} active")
    return " · ".join(parts)


def show(name: str, value: float) -> str:
    """Format a number of the summary table."""
    if name == "seconds":
        return units.time(value)
    if name == "imbalance":
        return f"{value:.3f}×"
    return str(int(value)) if name == "slowest" else f"{value:.1%}"


def difference(name: str, first: float, second: float) -> str:
    """Format the difference between two numbers of the summary table."""
    if name == "seconds":
        return f"{second / first - 1:+.1%}" if first else "–"
    if name == "slowest":
        return ""
    return f"{second - first:+.3f}" if name == "imbalance" else f"{100 * (second - first):+.1f} points"


def _summary(cases: Sequence[Case]) -> str:
    summaries = [summary(case) for case in cases]
    two = len(cases) == 2
    names = [escape(case.name).replace("+", "+<wbr>") for case in cases]
    head = "".join(f"<th>{name}</th>" for name in names) if two else "<th></th>"
    rows = [f"<tr><th></th>{head}{'<th>difference</th>' if two else ''}<td class='note'></td></tr>"] * two
    for name, (label, meaning) in MEANINGS.items():
        cells = "".join(f'<td data-name="{name}">{show(name, one[name])}</td>' for one in summaries)
        if two:
            cells += f"<td>{difference(name, summaries[0][name], summaries[1][name])}</td>"
        rows.append(f'<tr><td>{label}</td>{cells}<td class="note">{meaning}</td></tr>')
    return f'<table id="summary">{"".join(rows)}</table>'


def verdict(cases: Sequence[Case]) -> str:
    """Return the verdict: the dominant cost and what reduces it."""
    if len(cases) == 2:
        first, second = (case.timeline.seconds for case in cases)
        faster, slower = (0, 1) if first <= second else (1, 0)
        gain = max(first, second) / (min(first, second) or 1.0)
        return f"{cases[faster].name} is {gain:.2f}× as fast as {cases[slower].name}."
    figures = summary(cases[0])
    costs = {
        f"Waiting for data costs most: {figures['exposed']:.1%} of the time.": figures["exposed"],
        f"Uneven work costs most: the busiest rank computes {figures['imbalance']:.2f}× the mean.": (
            figures["compute"] * (figures["imbalance"] - 1)
        ),
    }
    worst = max(costs, key=lambda cost: costs[cost])
    if costs[worst] < 0.02:
        return f"Little is lost: the mean rank computes {figures['compute']:.1%} of the time."
    return worst


def _figures(figures: Sequence[Figure]) -> list[str]:
    """Return the figures as HTML; figures of one group share a slider."""
    html: list[str] = []
    for group, some in groupby(figures, key=lambda figure: figure.group or figure.name):
        one, *others = some
        if not others:
            place = "wide" if one.wide else one.side
            html.append(f"<figure{place and f' class={place}'}>{_inner(one)}</figure>")
            continue
        parts = "".join(
            f"<div data-part{' hidden' * (i > 0)}>{_inner(figure)}</div>"
            for i, figure in enumerate((one, *others))
        )
        slider = f'<input type="range" min="0" max="{len(others)}" value="0" aria-label="{group}">'
        html.append(f"<figure{one.side and f' class={one.side}'}>{parts}{slider}</figure>")
    return html


def _inner(figure: Figure) -> str:
    return (
        f"<h2>{escape(figure.title)}</h2><div class='scroll'>{figure.svg(alone=False)}</div>"
        f"<figcaption>{escape(figure.caption)}</figcaption>"
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{top}</tr>{body}</table></div>"


def _plans(cases: Sequence[Case]) -> str:
    if len(cases) > 1 or len(cases[0].plans) < 2:
        return ""
    rows = [
        [
            point.plan,
            units.time(point.seconds),
            f"{point.exposed:.1%}",
            f"{point.imbalance:.3f}",
            units.size(point.intra_bytes),
            units.size(point.inter_bytes),
            units.size(point.memory) if point.memory else "–",
        ]
        for point in cases[0].plans
    ]
    head = ["plan", "attention", "exposed", "imbalance in time", "inside", "between", "memory"]
    return f"<details open><summary>Plans, the fastest first</summary>{_table(head, rows)}</details>"


def _layer_plans(case: Case) -> str:
    """Return the table of plans by layer, with the gain over the first plan of the layer."""
    if case.explained is None or not case.explained.layers:
        return ""
    rows = [[layer.place, layer.plan, *layer.numbers, str(layer.changed)] for layer in case.explained.layers]
    table = _table(["layer", "plan", "imbalance", "by its first plan", "gain", "changed"], rows)
    return f"<details open><summary>Plans by layer of {escape(case.name)}</summary>{table}</details>"


def _ranks(case: Case) -> str:
    per_rank = numbers(case)["per_rank"]
    memory = per_rank["memory"] or [0] * case.ranks
    rows = [
        [str(rank), *map(units.time, times), units.size(sent), units.size(peak) if peak else "–"]
        for rank, (*times, sent, peak) in enumerate(
            zip(
                per_rank["compute"],
                per_rank["exposed"],
                per_rank["idle"],
                per_rank["sent"],
                memory,
                strict=True,
            )
        )
    ][:MOST_ROWS]
    table = _table(["rank", "compute", "exposed", "idle", "sent", "memory"], rows)
    more = (
        f"<p class=note>{case.ranks - MOST_ROWS} more in report.json.</p>" if case.ranks > MOST_ROWS else ""
    )
    return f"<details><summary>Ranks of {escape(case.name)}</summary>{table}{more}</details>"


def _codes(names: Sequence[str]) -> str:
    return " and ".join(f"<code>{escape(name)}</code>" for name in names)
