"""Figures as values: rectangles, lines, text and images, written as SVG here and as PNG in `png`.

Figures have few shapes and must follow the color theme of the page, so they are written by hand: an SVG
of matplotlib is ten times as long and has one theme.
"""

from __future__ import annotations

import base64
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
    size: float = 12.5
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
    kind = "" if isinstance(shape, Label) else shape.kind
    if isinstance(shape, Polyline):
        points = " ".join(f"{_n(x)},{_n(y)}" for x, y in shape.points)
        stroke = {"stroke": _color(shape.color), "stroke_width": shape.width, "class": kind}
        faint = {"stroke_dasharray": "5 4" * shape.dashed, "stroke_opacity": _faint(shape.strength)}
        return _tag("polyline", points=points, fill="none", **stroke, **faint)
    if isinstance(shape, Dot):
        place = {"cx": shape.x, "cy": shape.y, "r": shape.radius}
        return _tag("circle", _tip(shape.tip), **place, fill=_color(shape.color), **{"class": kind})
    place = {"x": shape.x, "y": shape.y}
    if isinstance(shape, Label):
        anchor = shape.anchor if shape.anchor != "start" else ""
        words = {"fill": _color(shape.color), "text_anchor": anchor, "font_weight": "600" * shape.bold}
        return _tag("text", escape(shape.text), **place, font_size=shape.size, **words)
    place |= {"width": shape.width, "height": shape.height}
    if isinstance(shape, Pixels):
        style = {"preserveAspectRatio": "none", "style": "image-rendering:pixelated"}
        return _tag("image", **place, **style, **{"class": kind}, href=shape.address)
    outline = {"stroke": _color(shape.outline), "stroke_width": 1.5} if shape.outline else {}
    fill = "url(#hatch)" if shape.hatched else _color(shape.fill) if shape.fill else "none"
    filling = {"fill": fill, "fill_opacity": _faint(shape.strength), **outline, "class": kind}
    return _tag("rect", _tip(shape.tip), **place, **filling)


def _tag(name: str, content: str = "", **attributes: str | float) -> str:
    """Return an SVG element without its empty attributes; `_` stands for `-` in their names."""
    words = "".join(
        f' {key.replace("_", "-")}="{value if isinstance(value, str) else _n(value)}"'
        for key, value in attributes.items()
        if value != ""
    )
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def _color(name: str) -> str:
    return f"var(--{name})"


def _faint(strength: float) -> str:
    return _n(strength) if strength < 1 else ""


def _tip(tip: str) -> str:
    return f"<title>{escape(tip)}</title>" if tip else ""


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")
