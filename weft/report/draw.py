"""A figure as a value: rectangles, lines, words and pictures, written as SVG here and as PNG in `png`.

Figures are few shapes and must follow the page's colours, so they are written by hand: an SVG of
matplotlib is ten times as long and knows one theme.
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
    """What it stands for; the class of the SVG element."""
    tip: str = ""
    hatched: bool = False
    outline: str = ""


@dataclass(frozen=True)
class Line:
    """A line through points, in a colour."""

    points: tuple[tuple[float, float], ...]
    colour: str = "ink"
    width: float = 1.0
    dashed: bool = False
    kind: str = ""
    strength: float = 1.0


@dataclass(frozen=True)
class Dot:
    """A filled circle."""

    x: float
    y: float
    colour: str = "ink"
    radius: float = 4.0
    kind: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Words:
    """A line of text; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    size: float = 12.0
    colour: str = "muted"
    anchor: str = "start"
    bold: bool = False


@dataclass(frozen=True, eq=False)
class Picture:
    """Pixels [rows, columns, red green blue alpha], each drawn as a sharp square."""

    x: float
    y: float
    width: float
    height: float
    pixels: npt.NDArray[np.uint8]
    kind: str = ""

    @cached_property
    def address(self) -> str:
        """The picture itself, as an address: made once, written in the page and in a file."""
        return "data:image/png;base64," + base64.b64encode(encode(self.pixels)).decode()


Shape = Rect | Line | Dot | Words | Picture


@dataclass(frozen=True)
class Figure:
    """Shapes on paper of so many pixels, with a title that says what is to be seen."""

    name: str
    title: str
    width: float
    height: float
    shapes: tuple[Shape, ...]
    caption: str = ""
    wide: bool = False
    """Takes the whole width of the page."""
    group: str = ""
    """Figures of one group share a place; a slider chooses among them."""
    side: str = ""
    """Of two cases: `a` stands on the left, `b` on the right."""

    def svg(self, *, alone: bool = True) -> str:
        """As a file of its own, or for a page that has the colours already."""
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
"""Stands once in a page or a file; every hatched rectangle points to it."""


def _element(shape: Shape) -> str:
    if isinstance(shape, Rect):
        return _rect(shape)
    if isinstance(shape, Line):
        return _line(shape)
    if isinstance(shape, Dot):
        return (
            f'<circle cx="{_n(shape.x)}" cy="{_n(shape.y)}" r="{_n(shape.radius)}" '
            f'fill="var(--{shape.colour})"{_kind(shape.kind)}>{_tip(shape.tip)}</circle>'
        )
    if isinstance(shape, Words):
        bold = ' font-weight="600"' if shape.bold else ""
        anchor = f' text-anchor="{shape.anchor}"' if shape.anchor != "start" else ""
        return (
            f'<text x="{_n(shape.x)}" y="{_n(shape.y)}" font-size="{_n(shape.size)}" '
            f'fill="var(--{shape.colour})"{anchor}{bold}>{escape(shape.text)}</text>'
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


def _line(shape: Line) -> str:
    points = " ".join(f"{_n(x)},{_n(y)}" for x, y in shape.points)
    dashed = ' stroke-dasharray="5 4"' if shape.dashed else ""
    faint = f' stroke-opacity="{_n(shape.strength)}"' if shape.strength < 1 else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="var(--{shape.colour})" '
        f'stroke-width="{_n(shape.width)}"{dashed}{faint}{_kind(shape.kind)}/>'
    )


def _kind(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def _tip(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


def rules(x: tuple[float, float], ticks: Iterable[tuple[float, str]]) -> list[Shape]:
    """Horizontal rules at heights, each with its number on the left."""
    found: list[Shape] = []
    for y, text in ticks:
        found.append(Line(((x[0], y), (x[1], y)), "rule"))
        found.append(Words(x[0] - 6, y + 4, text, 12.5, anchor="end"))
    return found
