"""A frame for curves over the steps of a run: axes, lines through many points, and a legend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from weft.core import units
from weft.report.curves import decades, log_scale
from weft.report.draw import Dot, Figure, Line, Shape, Words, rules
from weft.report.training import FloatArray

LEFT, MARGIN, TOP, HALF, WIDE = 62.0, 22.0, 24.0, 480.0, 960.0


@dataclass(frozen=True)
class Frame:
    """Steps across and a number upwards, as places on paper of some size."""

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
            up = units.ticks(self.high - min(0.0, self.low))
            heights = [t for t in sorted({*up, *(-t for t in up)}) if self.low <= t <= self.high]
        return [*rules((LEFT, self.right), ((self.y(t), show(t)) for t in heights)), *self.across()]

    def across(self) -> list[Shape]:
        """The steps, below."""
        first, last = self.steps
        return [
            *(
                Words(self.x(tick), self.bottom + 15, f"{tick:,.0f}", 12.5, anchor="middle")
                for tick in units.ticks(last, 8)
                if tick >= first
            ),
            Words(self.right, self.bottom + 31, "step", 12.5, anchor="end"),
        ]

    def curve(
        self, steps: FloatArray, values: FloatArray, colour: str, *, dashed: bool = False, kind: str
    ) -> list[Shape]:
        """A line through what is finite, in parts where something is not."""
        points = [
            (self.x(float(step)), self.y(float(value))) for step, value in zip(steps, values, strict=True)
        ]
        known = np.isfinite(values)
        parts = np.split(np.arange(len(values)), np.flatnonzero(np.diff(known)) + 1)
        return [
            Line(tuple(points[i] for i in part), colour, 2.0, dashed, kind)
            for part in parts
            if part.size and known[part[0]]
        ]

    def cloud(self, steps: FloatArray, values: FloatArray, colour: str) -> list[Shape]:
        """All values, faint: from the least to the most in each two pixels."""
        column = np.interp(steps, self.steps, (LEFT, self.right)) // 2
        points: list[tuple[float, float]] = []
        for some in np.split(np.arange(len(steps)), np.flatnonzero(np.diff(column)) + 1):
            known = values[some][np.isfinite(values[some])]
            if known.size:
                x = 2 * float(column[some[0]]) + 1
                points += [(x, self.y(float(known.min()))), (x, self.y(float(known.max())))]
        return [Line(tuple(points), colour, 1.0, kind="raw", strength=0.35)] * bool(points)


def framed(
    name: str,
    title: str,
    frame: Frame,
    shapes: Sequence[Shape],
    entries: Sequence[tuple[str, str]],
    *,
    caption: str = "",
    wide: bool = False,
) -> Figure:
    """With a legend below the axis, as many entries in a line as there is room for."""
    legend: list[Shape] = []
    x, y = LEFT, frame.bottom + 36
    for colour, text in entries:
        room = 30 + 6.8 * len(text)
        if x > LEFT and x + room > frame.right - 40:
            x, y = LEFT, y + 18
        legend += [Dot(x, y - 4, colour, 4)] * bool(colour)
        legend.append(Words(x + 10 * bool(colour), y, text, 12.5))
        x += room
    return Figure(name, title, frame.width, y + 10, (*shapes, *legend), caption=caption, wide=wide)
