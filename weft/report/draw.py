"""Figures as values: rectangles, lines, text and images, written as SVG here and as PNG in `png`.

Figures have few shapes and must follow the color theme of the page, so they are written by hand: an SVG
of matplotlib is ten times as long and has one theme.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from html import escape

import numpy as np
import numpy.typing as npt

from weft.report.palette import style_sheet
from weft.report.png import encode

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','DejaVu Sans',sans-serif"
HATCH = 5.0
"""Pixels between the lines of a hatched rectangle."""


@dataclass(frozen=True)
class Rect:
    """A filled rectangle; hatched ones have diagonal lines instead of a filling."""

    x: float
    y: float
    width: float
    height: float
    fill: str = "ink"
    strength: float = 1.0
    kind: str = ""
    """CSS class of the SVG element, which names its meaning."""
    tip: str = ""
    hatched: bool = False
    outline: str = ""


@dataclass(frozen=True)
class Polyline:
    """A polyline in one color."""

    points: tuple[tuple[float, float], ...]
    color: str = "ink"
    width: float = 1.0
    dashed: bool = False
    kind: str = ""
    strength: float = 1.0


@dataclass(frozen=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    color: str = "ink"
    radius: float = 4.0
    kind: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Label:
    """A line of text; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    size: float = 12.0
    color: str = "muted"
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True, eq=False)
class Pixels:
    """Pixels [rows, columns, red green blue alpha], each drawn as a sharp square."""

    x: float
    y: float
    width: float
    height: float
    pixels: npt.NDArray[np.uint8]
    kind: str = ""

    @cached_property
    def address(self) -> str:
        """Return the image as a data URI; encoded once, used in the page and in a file."""
        return "data:image/png;base64," + base64.b64encode(encode(self.pixels)).decode()


Shape = Rect | Polyline | Dot | Label | Pixels


@dataclass(frozen=True)
class Figure:
    """Shapes on a canvas of `width` × `height` pixels, with a title."""

    name: str
    title: str
    width: float
    height: float
    shapes: tuple[Shape, ...]
    caption: str = ""
    wide: bool = False
    """Whether the figure takes the full width of the page."""
    group: str = ""
    """Figures of one group share a slot; a slider selects one."""
    side: str = ""
    """When two cases are compared: `a` is shown on the left, `b` on the right."""

    def svg(self, *, alone: bool = True) -> str:
        """Return the SVG: standalone, or for a page that defines the colors."""
        body = "".join(map(_element, self.shapes))
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_n(self.width)} {_n(self.height)}" '
            f'role="img" aria-label="{escape(self.title)}" font-family="{FONT}"'
        )
        if not alone:
            return f'{head} id="{self.name}">{body}</svg>'
        size = f' width="{_n(self.width)}" height="{_n(self.height)}"'
        style = f"<style>{style_sheet('svg')}svg{{background:var(--paper)}}</style>"
        return f"{head}{size}>{style}{HATCHES}{body}</svg>\n"


HATCHES = (
    f'<defs><pattern id="hatch" width="{HATCH}" height="{HATCH}" patternUnits="userSpaceOnUse" '
    f'patternTransform="rotate(45)"><rect width="{HATCH}" height="{HATCH}" fill="var(--paper)"/>'
    f'<line x1="0" y1="0" x2="0" y2="{HATCH}" stroke="var(--alarm)" stroke-width="2.4"/></pattern></defs>'
)
"""The hatch pattern, defined once per document."""


def _element(shape: Shape) -> str:
    if isinstance(shape, Rect):
        return _rect(shape)
    if isinstance(shape, Polyline):
        return _line(shape)
    if isinstance(shape, Dot):
        return (
            f'<circle cx="{_n(shape.x)}" cy="{_n(shape.y)}" r="{_n(shape.radius)}" '
            f'fill="var(--{shape.color})"{_kind(shape.kind)}>{_tip(shape.tip)}</circle>'
        )
    if isinstance(shape, Label):
        bold = ' font-weight="600"' if shape.bold else ""
        anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
        return (
            f'<text x="{_n(shape.x)}" y="{_n(shape.y)}" font-size="{_n(shape.size)}" '
            f'fill="var(--{shape.color})"{anchor}{bold}>{escape(shape.text)}</text>'
        )
    return (
        f'<image x="{_n(shape.x)}" y="{_n(shape.y)}" width="{_n(shape.width)}" height="{_n(shape.height)}" '
        f'preserveAspectRatio="none" style="image-rendering:pixelated"{_kind(shape.kind)} '
        f'href="{shape.address}"/>'
    )


def _rect(shape: Rect) -> str:
    fill = "url(#hatch)" if shape.hatched else "none" if not shape.fill else f"var(--{shape.fill})"
    words = [f'x="{_n(shape.x)}" y="{_n(shape.y)}" width="{_n(shape.width)}" height="{_n(shape.height)}"']
    words.append(f'fill="{fill}"')
    if shape.strength < 1:
        words.append(f'fill-opacity="{_n(shape.strength)}"')
    if shape.outline:
        words.append(f'stroke="var(--{shape.outline})" stroke-width="1.5"')
    return f"<rect {' '.join(words)}{_kind(shape.kind)}>{_tip(shape.tip)}</rect>"


def _line(shape: Polyline) -> str:
    points = " ".join(f"{_n(x)},{_n(y)}" for x, y in shape.points)
    dashed = ' stroke-dasharray="5 4"' if shape.dashed else ""
    faint = f' stroke-opacity="{_n(shape.strength)}"' if shape.strength < 1 else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="var(--{shape.color})" '
        f'stroke-width="{_n(shape.width)}"{dashed}{faint}{_kind(shape.kind)}/>'
    )


def _kind(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _tip(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def rules(x: tuple[float, float], ticks: Iterable[tuple[float, str]]) -> list[Shape]:
    """Return horizontal grid lines with their numbers on the left."""
    shapes: list[Shape] = []
    for y, text in ticks:
        shapes.append(Polyline(((x[0], y), (x[1], y)), "rule"))
        shapes.append(Label(x[0] - 6, y + 4, text, 12.5, anchor="end"))
    return shapes
