"""Curves over the steps of training runs: loss, speed, and how much of the attention is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from weft.core import units
from weft.report.draw import Dot, Figure, Line, Rect, Shape, Words
from weft.report.frame import HALF, TOP, WIDE, Frame, framed
from weft.report.sparsity import heads_figure, sparsity_map
from weft.report.trained import summary
from weft.report.training import FloatArray, Run, finite

COLOURS = ("c4", "c5", "c2", "c6", "c0", "c1", "c7", "ink")
"""Of runs; lines on white, so that the pale ones come late."""
POINTS = 480
"""Of a curve, at most."""
APART = 76.0
"""Pixels between the words of two marks."""


def draw_runs(runs: Sequence[Run]) -> tuple[list[Figure], list[str]]:
    """The figures that can be drawn, and what each of the others would need."""
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
        figures += [speed_figure(timed), seconds_figure(timed)]
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
    """Every step's loss faintly, its running mean, validation as dots; of several runs the means and dots."""
    alone = len(runs) == 1
    smooth = [running(run, run.values["loss"], np.nanmean) for run in runs]
    seen = finite(
        np.concatenate([*(values for _, values in smooth), *(run.validation[:, 1] for run in runs)])
    )
    if alone and (all_of_it := finite(runs[0].values["loss"])).size:
        seen = np.append(seen, np.quantile(all_of_it, [0.002, 0.998]))
    low, high = (float(seen.min()), float(seen.max())) if seen.size else (0.0, 1.0)
    logs = low > 0 and high > 4 * low
    frame = Frame(WIDE, 262.0, _steps(runs), low / 1.05 if logs else min(0.0, low), 1.05 * high, logs)
    shapes = frame.axes(lambda value: f"{value:.3g}")
    shapes += (
        [*_marks(runs[0], frame), *frame.cloud(runs[0].step, runs[0].values["loss"], "c4")] if alone else []
    )
    for run, curve, colour in zip(runs, smooth, COLOURS, strict=False):
        shapes += frame.curve(*curve, colour, kind="loss")
        for step, value in run.validation[np.isfinite(run.validation[:, 1])]:
            tip = f"{run.name}, validation at step {step:,.0f}: {value:.4f}"
            place = frame.x(step), frame.y(value)
            shapes.append(Dot(*place, "c5" if alone else colour, 3.5 if alone else 2.5, "validation", tip))
    entries = _entries(runs, f"loss (faint: every step, full: mean of {runs[0].window})")
    if any(len(run.validation) for run in runs):
        entries.append(("c5", "validation") if alone else ("", "dots: validation"))
    if broken := [float(step) for run in runs for step in run.step[~np.isfinite(run.values["loss"])]]:
        entries.append(("alarm", f"not a number ({len(broken):,} steps)"))
        places = sorted({2 * round(frame.x(step) / 2) for step in broken})
        shapes += [Rect(x - 1, TOP, 2, 8, "alarm", kind="broken") for x in places]
    if alone and runs[0].resumed:
        entries.append(("", "▲ resumed"))
    return framed("loss", _loss_title(runs), frame, shapes, entries, wide=True)


def _loss_title(runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        return f"Loss of {len(runs)} runs"
    known = summary(runs[0])
    held_out = f", {known['validation']:.4f} on validation" if known["validation"] is not None else ""
    loss = f"{known['loss']:.4f}" if known["loss"] is not None else "not a number"
    return f"Loss: {loss} after {runs[0].last:,} steps{held_out}"


def apart_figure(runs: Sequence[Run]) -> Figure | None:
    """How far the validation loss of each run is from that of the first at the same steps."""
    first = dict(runs[0].validation)
    curves: list[tuple[FloatArray, FloatArray]] = []
    for run in runs:
        both = [(step, 100 * (loss / first[step] - 1)) for step, loss in run.validation if first.get(step)]
        curves.append((np.array([step for step, _ in both]), np.array([gap for _, gap in both])))
    seen = finite(np.concatenate([values for _, values in curves[1:]]))
    if not seen.size:
        return None
    most = 1.1 * max(1.0, float(np.quantile(abs(seen), 0.95)))
    frame = Frame(HALF, 200.0, _steps(runs), -most, most)
    shapes = frame.axes(lambda value: f"{value:+.3g}%" if value else "0%")
    for (steps, values), colour in zip(curves, COLOURS, strict=False):
        shapes += frame.curve(steps, values, colour, kind="apart")
    title = f"Validation loss against that of {runs[0].name}"
    return framed("apart", title, frame, shapes, _entries(runs, ""), caption="Below zero is better.")


def speed_figure(runs: Sequence[Run]) -> Figure:
    """Samples a second."""
    titles = [f"{one['samples_per_second'] or 0:,.3g}" for one in map(summary, runs)]
    title = f"Speed: {' against '.join(titles)} samples/s" if len(runs) < 3 else "Speed: samples/s"
    return _timing("speed", title, runs, "samples", lambda value: units.short(units.count(value)))


def seconds_figure(runs: Sequence[Run]) -> Figure:
    """Seconds a step."""
    titles = [units.time(one["step_seconds"] or 0) for one in map(summary, runs)]
    title = f"Time of a step: {' against '.join(titles)}" if len(runs) < 3 else "Time of a step"
    return _timing("seconds", title, runs, "seconds", lambda value: units.short(units.time(value)))


def _timing(name: str, title: str, runs: Sequence[Run], what: str, show: Callable[[float], str]) -> Figure:
    """From zero; single steps that take very long, as those that compile do, lie outside."""
    smooth = [running(run, run.values[what], np.nanmedian) for run in runs]
    high = 1.25 * float(max([finite(values).max(initial=0.0) for _, values in smooth])) or 1.0
    frame = Frame(HALF, 200.0, _steps(runs), 0.0, high)
    shapes = frame.axes(show)
    if len(runs) == 1:
        shapes += [*_marks(runs[0], frame), *frame.cloud(runs[0].step, runs[0].values[what], "c4")]
    for curve, colour in zip(smooth, COLOURS, strict=False):
        shapes += frame.curve(*curve, colour, kind=name)
    over = np.concatenate([run.values[what][run.values[what] > high] for run in runs])
    beyond = f"{over.size:,} of the steps lie above, at most {show(float(over.max()))}." if over.size else ""
    entries = _entries(runs, f"faint: every step, full: median of {runs[0].window}")
    return framed(name, title, frame, shapes, entries, caption=beyond)


def coverage_figure(run: Run) -> Figure:
    """How much is computed, and how much of the mass that holds, over time."""
    frame = Frame(HALF, 200.0, _steps([run]), 0.0, 1.0)
    shapes = frame.axes(lambda value: f"{value:.1f}") + _marks(run, frame)
    entries: list[tuple[str, str]] = []
    for colour, text, name, of in (
        ("c4", "computed", "share", np.nanmean),
        ("c2", "coverage", "coverage", np.nanmean),
        ("c5", "coverage of the lowest layer", "coverage", np.nanmin),
    ):
        steps, values = _until_now(run, name, of)
        if np.isfinite(values).any():
            shapes += frame.curve(steps, values, colour, dashed=of is np.nanmin, kind="share")
            entries.append((colour, text))
    known = summary(run)
    title = f"Computed: {known['density']:.0%} of all attention"
    if known["coverage"] is not None:
        title = f"Computed: {known['density']:.0%}, with {known['coverage']:.0%} of the mass"
    return framed("coverage", title, frame, shapes, entries, caption=COVERAGE)


COVERAGE = (
    "Computed is the share of all attention, layers that are dense in full. Coverage is the share of a "
    "query's softmax mass on the keys that are selected for it; while a layer is dense, on as many "
    "predicted keys as are critical."
)


def computed_figure(runs: Sequence[Run]) -> Figure:
    """How much of the attention each run computes, over time."""
    frame = Frame(HALF, 200.0, _steps(runs), 0.0, 1.0)
    shapes = frame.axes(lambda value: f"{value:.1f}")
    for run, colour in zip(runs, COLOURS, strict=False):
        dense = np.array([run.step[0], run.last]), np.ones(2)
        curve = _until_now(run, "share", np.nanmean) if run.layers else dense
        shapes += frame.curve(*curve, colour, kind="share")
    return framed("computed", "Computed, of all attention", frame, shapes, _entries(runs, ""))


def running(run: Run, values: FloatArray, of: Callable[..., Any]) -> tuple[FloatArray, FloatArray]:
    """(steps, what the values around each come to): of many steps only some, at the ends of fewer values."""
    chosen = np.unique(np.linspace(0, len(values) - 1, min(len(values), POINTS)).round().astype(int))
    around = chosen + np.arange(run.window)[:, None] - run.window // 2
    inside = (around >= 0) & (around < len(values))
    found = _columns(np.where(inside, values[np.where(inside, around, 0)], np.nan), of)
    return run.step[chosen], np.where(np.isfinite(values[chosen]), found, np.nan)


def _columns(table: FloatArray, of: Callable[..., Any]) -> FloatArray:
    """Of what is finite in each column; NaN where nothing is."""
    table = np.where(np.isfinite(table), table, np.nan)
    found = np.full(table.shape[1], np.nan)
    some = ~np.isnan(table).all(axis=0)
    if some.any():
        found[some] = of(table[:, some], axis=0)
    return found


def _until_now(run: Run, name: str, of: Callable[..., Any]) -> tuple[FloatArray, FloatArray]:
    """Over the layers; what was known last holds until the last step."""
    steps, table = run.over_time(name)
    values = _columns(table, of)
    return np.append(steps, max(run.last, steps[-1])), np.append(values, values[-1])


def _steps(runs: Sequence[Run]) -> tuple[float, float]:
    return min(float(run.step[0]) for run in runs), max(float(run.last) for run in runs)


def _entries(runs: Sequence[Run], alone: str) -> list[tuple[str, str]]:
    texts = [alone] if len(runs) == 1 else [run.name for run in runs]
    return list(zip(COLOURS, texts, strict=False))


def _marks(run: Run, frame: Frame) -> list[Shape]:
    """Where layers turn sparse or dense again, and where the run was resumed."""
    found: list[Shape] = []
    said = frame.right
    # From the right: how it is now is always said.
    for step, sparse in reversed(run.changes):
        x = frame.x(step)
        ends = (x, TOP), (x, frame.bottom)
        found.append(Line(ends, "muted", 1.0, dashed=True, kind="stage", strength=0.6))
        if not found[1:] or said - x >= APART:
            said = min(x, frame.right - 24)
            found.append(Words(said, TOP - 7, f"{sparse}/{len(run.layers)} sparse", 11.5, anchor="middle"))
    return found + [Words(frame.x(step), frame.bottom, "▲", 9, anchor="middle") for step in run.resumed]
