"""The report on one training run, or the comparison of several."""

from __future__ import annotations

from collections.abc import Sequence

from weft.report.learning import draw_runs
from weft.report.page import Report, SummaryRow, Table
from weft.report.terminal import sparkline
from weft.report.trained import about, layer_rows, rows, summary, verdict
from weft.report.training import Run


def report_runs(runs: Sequence[Run]) -> Report:
    """Return the report on one training run, or the comparison of several."""
    figures, missing = draw_runs(runs)
    alone, of = len(runs) == 1, [rows(run) for run in runs]
    labels = dict.fromkeys(label for table in of for label in table)
    table = [
        SummaryRow(label, [one.get(label, ("–", ""))[0] for one in of], note=of[0][label][1] if alone else "")
        for label in labels
    ]
    verdicts = [verdict(run) for run in runs]
    return Report(
        title=" against ".join(run.name for run in runs) if len(runs) < 3 else f"{len(runs)} training runs",
        about=" — ".join(dict.fromkeys(map(about, runs))),
        rows=table,
        figures=figures,
        missing=missing,
        numbers={"runs": [{"name": run.name} | summary(run) for run in runs]},
        columns=[] if alone else [run.name for run in runs],
        verdict=verdicts[0] if alone else "",
        tables=[
            Table(f"Layers of {run.name}, now", *layer_rows(run), printed=True) for run in runs if run.layers
        ],
        lines=[f"{sparkline(run.values['loss'])}  loss" + f" of {run.name}" * (not alone) for run in runs],
    )
