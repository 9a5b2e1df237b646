"""Matrices from rank to rank: bytes that each sends to each, with machine borders."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.core import units
from weft.report.case import Case
from weft.report.draw import Figure, Label, Pixels, Polyline, Rect, Shape
from weft.report.frame import HALF, color_bar
from weft.report.palette import rgb

SIDE, LEFT, TOP = 300.0, 92.0, 30.0
CELLS = 32
"""Above this many ranks, cells are pixels without tooltips."""


def traffic_matrix(case: Case) -> Figure:
    """Draw bytes sent, row to column; colors start at zero."""
    sent, ranks = case.traffic, case.ranks
    most = int(sent.max(initial=0))
    strength = sent / (most or 1)
    cell = SIDE / ranks
    shapes: list[Shape] = [Rect(LEFT, TOP, SIDE, SIDE, "panel")]
    if ranks <= CELLS:
        for a, b in np.argwhere(sent):
            tip = f"rank {a} → rank {b}: {units.size(int(sent[a, b]))}"
            x, y = LEFT + b * cell, TOP + a * cell
            shapes.append(Rect(x, y, cell, cell, "c4", float(strength[a, b]), "traffic", tip))
    else:
        shapes.append(Pixels(LEFT, TOP, SIDE, SIDE, _pixels(strength), "traffic"))
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
    ramp = _pixels(np.linspace(0, 1, 40)[None])
    shapes += color_bar(LEFT, TOP + SIDE + 22, ramp, ("0", units.size(most)))
    machine = np.arange(ranks) // devices
    between, total = int(sent[machine[:, None] != machine].sum()), int(sent.sum())
    share = f", {between / total:.0%} of it between machines" if case.machines > 1 and total else ""
    least, end = int(sent[sent > 0].min(initial=most)), TOP + SIDE + 32
    caption = (
        f"Each pair that sends: {units.size(least)} to {units.size(most)}." if total else "Nothing is sent."
    )
    return Figure("traffic", f"Traffic: {units.size(total)}{share}", HALF, end, tuple(shapes), caption)


def _pixels(strength: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    planes = np.zeros((*strength.shape, 4), dtype=np.uint8)
    planes[:, :, :3] = rgb("c4")
    planes[:, :, 3] = (255 * strength).round()
    return planes
