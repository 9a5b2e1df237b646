"""Traffic matrix: bytes from each rank to each rank, with machine borders."""

from __future__ import annotations

import numpy as np

from weft.core import units
from weft.report.case import Case
from weft.report.draw import Figure, Label, Pixels, Polyline, Rect, Shape
from weft.report.palette import rgb

WIDTH, SIDE, LEFT, TOP = 480.0, 300.0, 92.0, 30.0
CELLS = 32
"""Above this many ranks, cells are pixels without tooltips."""


def traffic_matrix(case: Case) -> Figure:
    """Draw bytes sent, row to column, on a logarithmic scale."""
    sent, ranks = case.traffic, case.ranks
    strength = _strength(sent)
    cell = SIDE / ranks
    shapes: list[Shape] = [Rect(LEFT, TOP, SIDE, SIDE, "panel")]
    if ranks <= CELLS:
        for a, b in np.argwhere(sent):
            tip = f"rank {a} → rank {b}: {units.size(int(sent[a, b]))}"
            x, y = LEFT + b * cell, TOP + a * cell
            shapes.append(Rect(x, y, cell, cell, "c4", float(strength[a, b]), "traffic", tip))
    else:
        planes = np.zeros((ranks, ranks, 4), dtype=np.uint8)
        planes[:, :, :3] = rgb("c4")
        planes[:, :, 3] = (255 * strength).round()
        shapes.append(Pixels(LEFT, TOP, SIDE, SIDE, planes, "traffic"))
    devices = max(1, ranks // case.machines)
    for machine in range(case.machines + 1):
        at = machine * devices * cell
        shapes.append(Polyline(((LEFT + at, TOP), (LEFT + at, TOP + SIDE)), "ink", 1.0, kind="machine"))
        shapes.append(Polyline(((LEFT, TOP + at), (LEFT + SIDE, TOP + at)), "ink", 1.0, kind="machine"))
    for rank in range(0, ranks, -(-ranks // 8)):
        shapes.append(Label(LEFT - 6, TOP + (rank + 0.5) * cell + 4, str(rank), anchor="end"))
        shapes.append(Label(LEFT + (rank + 0.5) * cell, TOP - 6, str(rank), anchor="middle"))
    shapes.append(Label(LEFT - 34, TOP + SIDE / 2 + 4, "from", anchor="end"))
    shapes.append(Label(LEFT + SIDE + 8, TOP - 6, "to"))
    machine = np.arange(ranks) // devices
    between = int(sent[machine[:, None] != machine].sum())
    total = int(sent.sum())
    share = f", {between / total:.0%} of it between machines" if case.machines > 1 and total else ""
    title = f"Traffic: {units.size(total)}{share}"
    present = sent[sent > 0]
    caption = "Nothing is sent."
    if present.size:
        least, most = units.size(int(present.min())), units.size(int(present.max()))
        caption = f"Pale is {least}, full {most}, in logarithms." if least != most else f"{most} each."
    return Figure("traffic", title, WIDTH, TOP + SIDE + 12, tuple(shapes), caption=caption)


def _strength(sent: np.ndarray) -> np.ndarray:
    present = sent[sent > 0]
    if not present.size:
        return np.zeros(sent.shape)
    low, high = np.log(present.min()), np.log(present.max())
    scaled = np.ones(sent.shape) if high == low else (np.log(np.maximum(sent, 1)) - low) / (high - low)
    return np.where(sent > 0, 0.25 + 0.75 * scaled, 0.0)
