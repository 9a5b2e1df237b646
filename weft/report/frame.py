"""Scales, axes, curves and legends of charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.report.draw import Dot, Figure, Label, Pixels, Polyline, Rect, Shape

LEFT, MARGIN, TOP, HALF, WIDE = 62.0, 22.0, 24.0, 480.0, 960.0
LINE = 18.0
"""Height of a line of a legend."""

FloatArray = npt.NDArray[np.float64]
Show = Callable[[float], str]
Symbol = Rect | str
"""Of a legend: a rectangle of some size, the color of a dot, or "" for none."""


@dataclass(frozen=True)
class Scale:
    """Map numbers from `low` to `high` to pixels, linearly or by their logarithms; others are clipped."""

    low: float
    high: float
    start: float
    stop: float
    logs: bool = False

    def __call__(self, value: float) -> float:
        low, high, held = self.low, self.high, min(max(value, self.low), self.high)
        if self.logs:
            low, high, held = map(math.log, (low, high, held))
        return self.start + (self.stop - self.start) * (held - low) / ((high - low) or 1.0)

    def ticks(self, wanted: int = 5, apart: float = 20.0) -> list[float]:
        """Return round numbers of the scale, about as many as wanted."""
        if not self.logs:
            up = ticks(self.high - min(0.0, self.low), wanted)
            return [t for t in sorted({*up, *(-t for t in up)}) if self.low <= t <= self.high]
        powers = range(math.floor(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)
        inside: list[float] = []
        # One number per decade, more of them if there are few decades.
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
            inside = [s * 10.0**p for p in powers for s in steps if self.low <= s * 10.0**p <= self.high]
            if len(inside) >= wanted:
                break
        shown: list[float] = []
        for tick in inside:
            if not shown or abs(self(tick) - self(shown[-1])) >= apart:
                shown.append(tick)
        return shown


@dataclass(frozen=True)
class Chart:
    """A scale across and a scale up, which starts at the bottom."""

    x: Scale
    y: Scale

    def rows(self, show: Show, at: Iterable[float] | None = None, title: str = "") -> list[Shape]:
        """Return horizontal rules with their numbers on the left, and the title of the axis above them."""
        shapes: list[Shape] = [Label(4, self.y.stop - 10, title)] * bool(title)
        for tick in self.y.ticks() if at is None else at:
            y = self.y(tick)
            shapes.append(Polyline(((LEFT, y), (self.x.stop, y)), "rule"))
            shapes.append(Label(LEFT - 6, y + 4, show(tick), anchor="end"))
        return shapes

    def columns(self, show: Show, at: Iterable[float], title: str, *, ruled: bool = False) -> list[Shape]:
        """Return the numbers of the axis below, with its title; with `ruled`, also vertical rules."""
        bottom, shapes = self.y.start, list[Shape]()
        for tick in at:
            x = self.x(tick)
            shapes += [Polyline(((x, self.y.stop), (x, bottom)), "rule")] * ruled
            shapes.append(Label(x, bottom + 15, show(tick), anchor="middle"))
        return [*shapes, Label(self.x.stop, bottom + 31, title, anchor="end")]

    def line(self, points: Iterable[tuple[float, float]], color: str, width: float, **style: Any) -> Polyline:
        return Polyline(tuple((self.x(x), self.y(y)) for x, y in points), color, width, **style)

    def curve(self, xs: FloatArray, ys: FloatArray, color: str, kind: str, **style: bool) -> list[Shape]:
        """Return a line through the finite values, broken where values are not finite."""
        known = np.isfinite(ys)
        segments = np.split(np.arange(len(ys)), np.flatnonzero(np.diff(known)) + 1)
        return [
            self.line(zip(xs[some].tolist(), ys[some].tolist(), strict=True), color, 2.0, kind=kind, **style)
            for some in segments
            if some.size and known[some[0]]
        ]

    def cloud(self, xs: FloatArray, ys: FloatArray, color: str) -> list[Shape]:
        """Return a faint band: minimum to maximum of the values in each two pixels."""
        column = np.interp(xs, (self.x.low, self.x.high), (self.x.start, self.x.stop)) // 2
        points: list[tuple[float, float]] = []
        for some in np.split(np.arange(len(xs)), np.flatnonzero(np.diff(column)) + 1):
            known = ys[some][np.isfinite(ys[some])]
            if known.size:
                x = 2 * float(column[some[0]]) + 1
                points += [(x, self.y(float(known.min()))), (x, self.y(float(known.max())))]
        return [Polyline(tuple(points), color, 1.0, kind="raw", strength=0.35)] * bool(points)

    def figure(
        self,
        name: str,
        title: str,
        shapes: Sequence[Shape],
        entries: Sequence[tuple[Symbol, str]],
        **more: Any,
    ) -> Figure:
        """Return the shapes with a legend below the axis; `more` are fields of the figure."""
        width = self.x.stop + MARGIN
        shown, end = legend(entries, self.y.start + 50, width)
        return Figure(name, title, width, end + 10, (*shapes, *shown), **more)


def legend(
    entries: Sequence[tuple[Symbol, str]], y: float, width: float, left: float = LEFT, size: float = 12.5
) -> tuple[list[Shape], float]:
    """Return a legend that is wrapped to the width of a figure, and the height of its last line."""
    shapes: list[Shape] = []
    x = left
    for symbol, text in entries:
        swatch = symbol if isinstance(symbol, Rect) else Rect(0, 0, 4.0 * bool(symbol), 8)
        room = swatch.width + 26 + 0.55 * size * len(text)
        if x > left and x + room > width - MARGIN - 40:
            x, y = left, y + LINE
        if isinstance(symbol, Rect):
            shapes.append(replace(symbol, x=x, y=y - symbol.height + 1))
        elif symbol:
            shapes.append(Dot(x, y - 4, symbol, 4))
        shapes.append(Label(x + swatch.width + 6 * bool(symbol), y, text, size))
        x += room
    return shapes, y


def color_bar(x: float, y: float, ramp: npt.NDArray[np.uint8], ends: tuple[str, str]) -> list[Shape]:
    """Return the scale of a color, with the numbers at its ends."""
    left = x + 8 + 7 * len(ends[0])
    return [Label(x, y, ends[0]), Pixels(left, y - 10, 80, 10, ramp), Label(left + 86, y, ends[1])]


def ticks(most: float, wanted: int = 5) -> list[float]:
    """Return round numbers from 0 up to `most`, about as many as wanted.

    >>> ticks(0.47)
    [0.0, 0.1, 0.2, 0.3, 0.4]
    """
    if not 1e-300 < most < math.inf:  # smaller values would underflow
        return [0.0]
    rough = most / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= 0.999 * rough)
    return [round(i * step, 12) for i in range(int(most / step * 1.000001) + 1)]
