"""Curves over training steps: loss, speed and attention density."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from weft.core import units
from weft.report.draw import Dot, Figure, Label, Polyline, Rect, Shape
from weft.report.frame import HALF, LEFT, MARGIN, TOP, WIDE, Chart, Scale, Show, Symbol
from weft.report.sparsity_figure import heads_figure, sparsity_map
from weft.report.trained import summary
from weft.report.training import FloatArray, Run, finite

COLORS: tuple[str, ...] = ("c4", "c5", "c2", "c6", "c0", "c1", "c7", "ink")
"""Colors of runs; lines are on white, so pale colors come last."""
POINTS = 480
"""Maximum number of points of a curve."""
APART = 76.0
"""Minimum pixels between the labels of two marks."""
Curve = tuple[FloatArray, FloatArray]
"""Steps and values."""


def draw_runs(runs: Sequence[Run]) -> tuple[list[Figure], list[str]]:
    """Return the figures that can be drawn, and for each other one what it lacks."""
    figures, missing = [loss_figure(runs)], []
    sparse = [run for run in runs if run.layers]
    if not any(len(run.validation) for run in runs):
        missing.append("validation (the log has none)")
    if not sparse:
        missing.append("sparsity (the log has no records of it)")
    elif len(runs) > 1:
        figures.append(computed_figure(runs))
    else:
        figures += [sparsity_map(runs[0]), heads_figure(runs[0]), coverage_figure(runs[0])]
        if summary(runs[0])["coverage"] is None:
            missing.append("coverage (the log has none)")
    if timed := [run for run in runs if np.isfinite(run.values["seconds"]).any()]:
        figures += timing_figures(timed)
    else:
        missing.append("speed (the log has no seconds)")
    if len(runs) > 1:
        figures[1:1] = [figure] if (figure := apart_figure(runs)) else []
        maps = [(run, sparsity_map(run)) for run in sparse]
        figures += [
            replace(figure, name=f"sparsity-{i}", title=f"{run.name} · {figure.title}")
            for i, (run, figure) in enumerate(maps)
        ]
    return figures, missing


def loss_figure(runs: Sequence[Run]) -> Figure:
    """Draw the loss of every step (faint), its running mean, and the validation loss as dots."""
    alone = len(runs) == 1
    smooth = [running(run, run.values["loss"], np.nanmean) for run in runs]
    seen = finite(
        np.concatenate([*(values for _, values in smooth), *(run.validation[:, 1] for run in runs)])
    )
    if alone and (all_of_it := finite(runs[0].values["loss"])).size:
        seen = np.append(seen, np.quantile(all_of_it, [0.002, 0.998]))
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (0.0, 1.0)
    logs = low > 0 and high > 4 * low
    frame = _chart(runs, (low / 1.05 if logs else min(0.0, low), 1.05 * high), wide=True, logs=logs)
    shapes = _axes(runs, frame, lambda value: f"{value:.3g}", "loss")
    for run, curve, color in zip(runs, smooth, COLORS, strict=False):
        shapes += frame.curve(*curve, color, kind="loss")
        for step, value in run.validation[np.isfinite(run.validation[:, 1])]:
            tip = f"{run.name}, validation at step {step:,.0f}: {value:.4f}"
            place = frame.x(step), frame.y(value)
            shapes.append(Dot(*place, "c5" if alone else color, 3.5 if alone else 2.5, "validation", tip))
    texts = [f"loss ({_faint(runs[0])}, full: mean of {runs[0].window})"]
    names = texts if alone else [run.name for run in runs]
    entries: list[tuple[Symbol, str]] = list(zip(COLORS, names, strict=False))
    if any(len(run.validation) for run in runs):
        entries.append(("c5", "validation") if alone else ("", "dots: validation"))
    if broken := [float(step) for run in runs for step in run.step[~np.isfinite(run.values["loss"])]]:
        entries.append(("alarm", f"not a number ({len(broken):,} steps)"))
        places = sorted({2 * round(frame.x(step) / 2) for step in broken})
        shapes += [Rect(x - 1, TOP, 2, 8, "alarm", kind="broken") for x in places]
    if alone and runs[0].resumed:
        entries.append(("", "▲ resumed"))
    return frame.figure("loss", _loss_title(runs), shapes, entries, wide=True)


def _loss_title(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"Loss of {len(runs)} runs"
    known = summary(runs[0])
    held_out = f", {known['validation']:.4f} on validation" if known["validation"] is not None else ""
    loss = f"{known['loss']:.4f}" if known["loss"] is not None else "not a number"
    return f"Loss: {loss} after {runs[0].last:,} steps{held_out}"


def apart_figure(runs: Sequence[Run]) -> Figure | None:
    """Draw the validation loss of each run relative to the first run at the same steps."""
    first = dict(runs[0].validation)
    curves: dict[str, Curve] = {}
    for run in runs:
        both = [(step, 100 * (loss / first[step] - 1)) for step, loss in run.validation if first.get(step)]
        curves[run.name] = np.array([step for step, _ in both]), np.array([gap for _, gap in both])
    seen = finite(np.concatenate([values for _, values in list(curves.values())[1:]]))
    if not seen.size:
        return None
    most = 1.1 * max(1.0, float(np.quantile(abs(seen), 0.95)))
    chart = _chart(runs, (-most, most))
    shapes = _axes(runs, chart, "{:+.3g}%".format)
    title = f"Validation loss against that of {runs[0].name}"
    return _drawn("apart", title, chart, shapes, curves, "Below zero is better.")


def timing_figures(runs: Sequence[Run]) -> list[Figure]:
    """Draw samples per second, and seconds per step."""
    known = list(map(summary, runs))
    speeds = [f"{one['samples_per_second'] or 0:,.3g}" for one in known]
    speed = f"Speed: {' against '.join(speeds)} samples/s" if len(runs) < 3 else "Speed: samples/s"
    times = [units.time(one["step_seconds"] or 0) for one in known]
    time = f"Time of a step: {' against '.join(times)}" if len(runs) < 3 else "Time of a step"
    return [
        _timing("speed", speed, runs, "samples", lambda value: units.short(units.count(value))),
        _timing("seconds", time, runs, "seconds", lambda value: units.short(units.time(value))),
    ]


def _timing(name: str, title: str, runs: Sequence[Run], what: str, show: Show) -> Figure:
    """The axis starts at zero; outliers such as steps that compile are clipped."""
    smooth = {run.name: running(run, run.values[what], np.nanmedian) for run in runs}
    high = 1.25 * float(max([finite(values).max(initial=0.0) for _, values in smooth.values()])) or 1.0
    if len(runs) == 1:
        smooth = {f"{_faint(runs[0])}, full: median of {runs[0].window}": smooth[runs[0].name]}
    chart = _chart(runs, (0.0, high))
    over = np.concatenate([run.values[what][run.values[what] > high] for run in runs])
    beyond = (
        f"{over.size:,} of the {runs[0].steps} lie above, at most {show(float(over.max()))}."
        if over.size
        else ""
    )
    return _drawn(name, title, chart, _axes(runs, chart, show, what), smooth, beyond)


def coverage_figure(run: Run) -> Figure:
    """Draw attention density and coverage over the steps."""
    curves = {
        "computed": _until_now(run, "share", np.nanmean),
        "coverage": _until_now(run, "coverage", np.nanmean),
        "coverage of the lowest layer": _until_now(run, "coverage", np.nanmin),
    }
    curves = {text: curve for text, curve in curves.items() if np.isfinite(curve[1]).any()}
    known, chart = summary(run), _chart([run])
    title = f"Computed: {known['density']:.0%} of all attention"
    if known["coverage"] is not None:
        title = f"Computed: {known['density']:.0%}, with {known['coverage']:.0%} of the mass"
    return _drawn("coverage", title, chart, _axes([run], chart), curves, COVERAGE)


COVERAGE = (
    "Computed is the share of all attention, layers that are dense in full. Coverage is the share of a "
    "query's softmax mass on the keys that are selected for it; while a layer is dense, on as many "
    "predicted keys as are critical."
)


def computed_figure(runs: Sequence[Run]) -> Figure:
    """Draw the attention density of each run over the steps."""
    curves = {
        run.name: _until_now(run, "share", np.nanmean)
        if run.layers
        else (np.array([run.step[0], run.last]), np.ones(2))
        for run in runs
    }
    chart = _chart(runs)
    return _drawn("computed", "Computed, of all attention", chart, _axes(runs, chart), curves)


def _drawn(
    name: str,
    title: str,
    chart: Chart,
    shapes: Sequence[Shape],
    curves: Mapping[str, Curve],
    caption: str = "",
) -> Figure:
    """Return the figure of curves by name, over axes."""
    lines = [chart.curve(*curve, color, name) for curve, color in zip(curves.values(), COLORS, strict=False)]
    entries = list(zip(COLORS, curves, strict=False))
    return chart.figure(name, title, [*shapes, *chain(*lines)], entries, caption=caption)


def _chart(
    runs: Sequence[Run], ends: tuple[float, float] = (0.0, 1.0), *, wide: bool = False, logs: bool = False
) -> Chart:
    steps = min(float(run.step[0]) for run in runs), max(float(run.last) for run in runs)
    across = Scale(*steps, LEFT, (WIDE if wide else HALF) - MARGIN)
    return Chart(across, Scale(*ends, 262.0 if wide else 200.0, TOP, logs))


def _axes(runs: Sequence[Run], chart: Chart, show: Show = "{:.1f}".format, raw: str = "") -> list[Shape]:
    """Return the axes; of one run also its marks and, faintly, all values of the series `raw`."""
    shapes = [*chart.rows(show), *chart.columns("{:,.0f}".format, chart.x.ticks(8), "step")]
    if len(runs) == 1:
        shapes += _marks(runs[0], chart)
        shapes += chart.cloud(runs[0].step, runs[0].values[raw], COLORS[0]) if raw else []
    return shapes


def running(run: Run, values: FloatArray, of: Callable[..., Any]) -> tuple[FloatArray, FloatArray]:
    """Return (steps, running means), subsampled; windows are shorter at both ends."""
    chosen = np.unique(np.linspace(0, len(values) - 1, min(len(values), POINTS)).round().astype(int))
    around = chosen + np.arange(run.window)[:, None] - run.window // 2
    inside = (around >= 0) & (around < len(values))
    columns = _columns(np.where(inside, values[np.where(inside, around, 0)], np.nan), of)
    return run.step[chosen], np.where(np.isfinite(values[chosen]), columns, np.nan)


def _columns(table: FloatArray, of: Callable[..., Any]) -> FloatArray:
    """Return the mean of the finite values of each column; NaN if there is none."""
    table = np.where(np.isfinite(table), table, np.nan)
    means = np.full(table.shape[1], np.nan)
    some = ~np.isnan(table).all(axis=0)
    if some.any():
        means[some] = of(table[:, some], axis=0)
    return means


def _until_now(run: Run, name: str, of: Callable[..., Any]) -> tuple[FloatArray, FloatArray]:
    """Return means over layers; the last reading of a layer holds until the next."""
    steps, table = run.over_time(name)
    values = _columns(table, of)
    return np.append(steps, max(run.last, steps[-1])), np.append(values, values[-1])


def _faint(run: Run) -> str:
    return "faint: every step" if run.every == 1 else f"faint: every {run.every}th step"


def _marks(run: Run, frame: Chart) -> list[Shape]:
    """Draw marks where layers turn sparse or dense, and where the run was resumed."""
    shapes: list[Shape] = []
    right = frame.x.stop
    # From the right, so that the latest mark always keeps its label.
    for step, sparse in reversed(run.changes):
        x = frame.x(step)
        ends = (x, TOP), (x, frame.y.start)
        shapes.append(Polyline(ends, "muted", 1.0, dashed=True, kind="stage", strength=0.6))
        if not shapes[1:] or right - x >= APART:
            right = min(x, frame.x.stop - 24)
            shapes.append(Label(right, TOP - 7, f"{sparse}/{len(run.layers)} sparse", 11.5, anchor="middle"))
    return shapes + [Label(frame.x(step), frame.y.start, "▲", 9, anchor="middle") for step in run.resumed]
