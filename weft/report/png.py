"""Encode PNGs with zlib, and render whole figures with matplotlib if it is installed."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weft.report.palette import LIGHT

if TYPE_CHECKING:
    from weft.report.draw import Figure, Shape

SCALE = 2
"""PNG pixels per figure pixel."""
INCH = 100
POINT = 72 / INCH
"""Points per figure pixel."""


def encode(pixels: npt.NDArray[np.uint8]) -> bytes:
    """[rows, columns, red green blue alpha] as a PNG."""
    rows, columns, _ = pixels.shape
    lines = np.zeros((rows, 1 + 4 * columns), dtype=np.uint8)  # byte 0 of each line: filter type none
    lines[:, 1:] = pixels.reshape(rows, -1)

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", columns, rows, 8, 6, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines.tobytes())) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def render(figure: Figure, path: str) -> None:
    """Draw a figure's shapes, in the light colors, with matplotlib."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Sheet

    with mpl.rc_context({"hatch.color": LIGHT["alarm"], "hatch.linewidth": 1.2}):
        sheet = Sheet(figsize=(figure.width / INCH, figure.height / INCH), facecolor=LIGHT["paper"])
        FigureCanvasAgg(sheet)
        axes = sheet.add_axes((0, 0, 1, 1), xlim=(0, figure.width), ylim=(figure.height, 0))
        axes.axis("off")
        for order, shape in enumerate(figure.shapes):
            _draw(axes, shape, order)
        axes.set(xlim=(0, figure.width), ylim=(figure.height, 0))  # an image changes them
        sheet.savefig(path, dpi=SCALE * INCH, metadata={"Software": None})


def _draw(axes: Any, shape: Shape, order: int) -> None:
    from matplotlib.patches import Rectangle

    from weft.report.draw import Dot, Label, Polyline, Rect

    if isinstance(shape, Rect):
        filling = {
            "facecolor": LIGHT["paper"] if shape.hatched else LIGHT.get(shape.fill, "none"),
            "edgecolor": LIGHT.get(shape.outline, "none"),
            "linewidth": POINT * 1.5 * bool(shape.outline),
            "hatch": "//////" if shape.hatched else None,
        }
        box = (shape.x, shape.y), shape.width, shape.height
        axes.add_patch(Rectangle(*box, alpha=shape.strength, zorder=order, **filling))
    elif isinstance(shape, Polyline):
        style = (0, (5, 4)) if shape.dashed else "-"
        line = {"color": LIGHT[shape.color], "lw": POINT * shape.width, "ls": style, "alpha": shape.strength}
        axes.plot(*zip(*shape.points, strict=True), zorder=order, **line)
    elif isinstance(shape, Dot):
        size, color = 2 * POINT * shape.radius, LIGHT[shape.color]
        axes.plot(shape.x, shape.y, "o", ms=size, color=color, zorder=order)
    elif isinstance(shape, Label):
        words = {
            "fontsize": POINT * shape.size,
            "color": LIGHT[shape.color],
            "ha": {"start": "left", "middle": "center", "end": "right"}[shape.anchor],
            "weight": "bold" if shape.bold else "normal",
        }
        axes.text(shape.x, shape.y, shape.text.replace("$", r"\$"), va="baseline", zorder=order, **words)
    else:
        box = (shape.x, shape.x + shape.width, shape.y + shape.height, shape.y)
        axes.imshow(shape.pixels, extent=box, interpolation="nearest", zorder=order, aspect="auto")
