"""Axes, curves and a legend for quantities over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.report.curves import decades, log_scale
from weft.report.draw import Dot, Figure, Label, Polyline, Shape, rules
from weft.report.training import FloatArray

LEFT, MARGIN, TOP, HALF, WIDE = 62.0, 22.0, 24.0, 480.0, 960.0


@dataclass(frozen=True)
class CurveFrame:
    """Map steps (x) and values (y) to pixels of a canvas."""

    width: float
    bottom: float
    steps: tuple[float, float]
    low: float
    high: float
    logs: bool = False

    @property
    def right(self) -> float:
        return self.width - MARGIN

    def x(self, step: float) -> float:
        first, last = self.steps
        return LEFT + (self.right - LEFT) * (step - first) / ((last - first) or 1.0)

    def y(self, value: float) -> float:
        held = min(max(value, self.low), self.high)
        if self.logs:
            return log_scale((self.low, self.high), (self.bottom, TOP))(held)
        return self.bottom - (self.bottom - TOP) * (held - self.low) / ((self.high - self.low) or 1.0)

    def axes(self, show: Callable[[float], str]) -> list[Shape]:
        if self.logs:
            heights = decades(self.low, self.high, self.y, wanted=5)
        else:
            up = ticks(self.high - min(0.0, self.low))
            heights = [t for t in sorted({*up, *(-t for t in up)}) if self.low <= t <= self.high]
        return [*rules((LEFT, self.right), ((self.y(t), show(t)) for t in heights)), *self.across()]

    def across(self) -> list[Shape]:
        """Return the step axis."""
        first, last = self.steps
        return [
            *(
                Label(self.x(tick), self.bottom + 15, f"{tick:,.0f}", 12.5, anchor="middle")
                for tick in ticks(last, 8)
                if tick >= first
            ),
            Label(self.right, self.bottom + 31, "step", 12.5, anchor="end"),
        ]

    def curve(
        self, steps: FloatArray, values: FloatArray, color: str, *, dashed: bool = False, kind: str
    ) -> list[Shape]:
        """Return a line through the finite values, broken where values are not finite."""
        points = [
            (self.x(float(step)), self.y(float(value))) for step, value in zip(steps, values, strict=True)
        ]
        known = np.isfinite(values)
        parts = np.split(np.arange(len(values)), np.flatnonzero(np.diff(known)) + 1)
        return [
            Polyline(tuple(points[i] for i in segment), color, 2.0, dashed, kind)
            for segment in parts
            if segment.size and known[segment[0]]
        ]

    def cloud(self, steps: FloatArray, values: FloatArray, color: str) -> list[Shape]:
        """Return a faint band: minimum to maximum of the values in each two pixels."""
        column = np.interp(steps, self.steps, (LEFT, self.right)) // 2
        points: list[tuple[float, float]] = []
        for some in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(column)) + 1):
            known = values[some][np.isfinite(values[some])]
            if known.size:
                x = 2 * float(column[some[0]]) + 1
                points += [(x, self.y(float(known.min()))), (x, self.y(float(known.max())))]
        return [Polyline(tuple(points), color, 1.0, kind="raw", strength=0.35)] * bool(points)


def framed(
    name: str,
    title: str,
    frame: CurveFrame,
    shapes: Sequence[Shape],
    entries: Sequence[tuple[str, str]],
    *,
    caption: str = "",
    wide: bool = False,
) -> Figure:
    """Return the shapes with a legend below the axis, wrapped to the width."""
    legend: list[Shape] = []
    x, y = LEFT, frame.bottom + 36
    for color, text in entries:
        room = 30 + 6.8 * len(text)
        if x > LEFT and x + room > frame.right - 40:
            x, y = LEFT, y + 18
        legend += [Dot(x, y - 4, color, 4)] * bool(color)
        legend.append(Label(x + 10 * bool(color), y, text, 12.5))
        x += room
    return Figure(name, title, frame.width, y + 10, (*shapes, *legend), caption=caption, wide=wide)


def ticks(most: float, wanted: int = 5) -> list[float]:
    """Return round numbers from 0 up to `most`, about as many as wanted.

    >>> ticks(0.47)
    [0.0, 0.1, 0.2, 0.3, 0.4]
    """
    if not 1e-300 < most < math.inf:  # below that, a tenth of it may be 0
        return [0.0]
    rough = most / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= 0.999 * rough)
    return [round(i * step, 12) for i in range(int(most / step * 1.000001) + 1)]
