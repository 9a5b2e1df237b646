"""Sparsity by layer over the steps of a run, and by head at its end."""

from __future__ import annotations

import numpy as np

from weft.report.draw import Dot, Figure, Label, Pixels, Polyline, Shape
from weft.report.frame import HALF, LEFT, TOP, WIDE, Chart, Scale, color_bar, ticks
from weft.report.palette import rgb
from weft.report.training import FloatArray, Run, mean

RIGHT = 782.0
COLUMNS = 360
"""Figure pixels per pixel of the map."""
MOST_LABELS = 32


def sparsity_map(run: Run) -> Figure:
    """Draw sparsity by layer (rows) and step (columns); underlined while the layer is sparse."""
    row, bottom = _row(run), TOP + _row(run) * len(run.layers)
    first, last = float(run.step[0]), float(run.last)
    chart = Chart(Scale(first, last, LEFT, RIGHT), Scale(0, len(run.layers), bottom, TOP))
    columns = first + (last - first) * (np.arange(COLUMNS) + 1) / COLUMNS
    steps, table = run.over_time("sparsity")
    _, sparse = run.over_time("sparse")
    place = np.searchsorted(steps, columns, side="right") - 1
    shown, used = (np.where(place >= 0, one[:, place], np.nan) for one in (table, sparse))
    shapes: list[Shape] = [Pixels(LEFT, TOP, RIGHT - LEFT, bottom - TOP, _pixels(shown), "sparsity")]
    for i, (layer, reading) in enumerate(run.now.items()):
        y = TOP + row * i
        shapes.append(Polyline(((LEFT, y), (RIGHT, y)), "paper", 2.0))
        shapes += _uses(used[i] == 1.0, y + row - 3, min(3.0, row / 4))
        if i % -(-len(run.layers) // MOST_LABELS) == 0:
            shapes.append(Label(LEFT - 6, y + row / 2 + 4, layer, anchor="end"))
            shapes += _numbers(reading.sparsity, y + row / 2 + 4)
    shapes += [
        *chart.columns("{:,.0f}".format, chart.x.ticks(8), "step"),
        Label(RIGHT + 10, TOP - 8, "now"),
        Label(RIGHT + 62, TOP - 8, "its heads"),
        Label(LEFT - 6, TOP - 8, "layer", anchor="end"),
        *_legend(bottom + 37),
    ]
    known = mean(shown[:, -1])
    title = f"Sparsity by layer: {known:.2f} on average now" if known == known else "Sparsity by layer"
    return Figure("sparsity", title, WIDE, bottom + 48, tuple(shapes), caption=NOTE, wide=True)


NOTE = (
    "Sparsity is the share of keys that a query could leave out and keep the mass that the recipe requires."
)


def heads_figure(run: Run) -> Figure:
    """Draw a dot for each head of each layer, at its latest reading."""
    row, bottom = _row(run), TOP + _row(run) * len(run.layers)
    chart = Chart(Scale(0, 1, LEFT, HALF - 16), Scale(0, len(run.layers), bottom, TOP))
    x = chart.x
    shapes = chart.columns("{:.1f}".format, ticks(1.0), "sparsity of a head", ruled=True)
    spread: dict[str, float] = {}
    for i, (layer, reading) in enumerate(run.now.items()):
        y = TOP + row * (i + 0.5)
        known = reading.sparsity[np.isfinite(reading.sparsity)]
        if i % -(-len(run.layers) // MOST_LABELS) == 0:
            shapes.append(Label(LEFT - 6, y + 4, layer, anchor="end"))
        if known.size:
            spread[layer] = float(np.ptp(known))
            shapes.append(Polyline(((x(known.min()), y), (x(known.max()), y)), "c4", 1.2, strength=0.5))
        for head in np.flatnonzero(np.isfinite(reading.sparsity)):
            value = float(reading.sparsity[head])
            tip = f"layer {layer}, head {head}: {value:.3f}"
            shapes.append(Dot(x(value), y, "c4", min(3.5, row / 3), "head", tip))
    shapes.append(Label(LEFT - 6, TOP - 8, "layer", anchor="end"))
    title = "Sparsity by head"
    if spread:
        widest = max(spread, key=lambda layer: spread[layer])
        known = run.now[widest].sparsity
        title += f": {np.nanmin(known):.2f} to {np.nanmax(known):.2f} in layer {widest}"
    return Figure("heads", title, HALF, bottom + 40, tuple(shapes))


def _row(run: Run) -> float:
    return float(np.clip(240.0 / len(run.layers), 9.0, 26.0))


def _pixels(values: FloatArray) -> np.ndarray:
    """Return the pixels of values [layers, columns] in [0, 1]; transparent if unknown."""
    planes = np.zeros((*values.shape, 4), dtype=np.uint8)
    planes[:, :, :3] = rgb("c4")
    planes[:, :, 3] = np.where(np.isfinite(values), 20 + 235 * np.nan_to_num(values) ** 2, 0).round()
    return planes


def _uses(sparse: np.ndarray, y: float, width: float) -> list[Shape]:
    """Return lines along the columns in which a layer is sparse."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], sparse, [False]]).astype(int)))
    scale = (RIGHT - LEFT) / COLUMNS
    return [
        Polyline(((LEFT + a * scale, y), (LEFT + b * scale, y)), "c0", width, kind="sparse")
        for a, b in edges.reshape(-1, 2)
    ]


def _numbers(heads: FloatArray, y: float) -> list[Shape]:
    known = heads[np.isfinite(heads)]
    if not known.size:
        return []
    words = [Label(RIGHT + 10, y, f"{known.mean():.2f}", color="ink")]
    if known.size > 1:
        words.append(Label(RIGHT + 62, y, f"{known.min():.2f} to {known.max():.2f}"))
    return list(words)


def _legend(y: float) -> list[Shape]:
    return [
        *color_bar(LEFT, y, _pixels(np.linspace(0, 1, 40)[None]), ("0", "1")),
        Polyline(((LEFT + 140, y - 4), (LEFT + 164, y - 4)), "c0", 3.0),
        Label(LEFT + 172, y, "computed sparsely"),
    ]
