"""Encode PNGs with zlib, and render whole figures with matplotlib if it is installed."""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from weft.report.palette import LIGHT

if TYPE_CHECKING:
    from weft.report.draw import Figure, Label, Polyline, Rect

SCALE = 2
"""PNG pixels per figure pixel."""
INCH = 100


def encode(pixels: npt.NDArray[np.uint8]) -> bytes:
    """[rows, columns, red green blue alpha] as a PNG."""
    rows, columns, _ = pixels.shape
    lines = np.zeros((rows, 1 + 4 * columns), dtype=np.uint8)  # every line begins with its filter: none
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

    from weft.report.draw import Dot, Label, Pixels, Polyline, Rect

    with mpl.rc_context({"hatch.color": LIGHT["alarm"], "hatch.linewidth": 1.2}):
        sheet = Sheet(figsize=(figure.width / INCH, figure.height / INCH), facecolor=LIGHT["paper"])
        FigureCanvasAgg(sheet)
        axes = sheet.add_axes((0, 0, 1, 1), xlim=(0, figure.width), ylim=(figure.height, 0))
        axes.axis("off")
        for order, shape in enumerate(figure.shapes):
            if isinstance(shape, Rect):
                _rect(axes, shape, order)
            elif isinstance(shape, Polyline):
                _line(axes, shape, order)
            elif isinstance(shape, Dot):
                axes.plot(
                    shape.x, shape.y, "o", ms=1.44 * shape.radius, color=LIGHT[shape.color], zorder=order
                )
            elif isinstance(shape, Label):
                _words(axes, shape, order)
            elif isinstance(shape, Pixels):
                box = (shape.x, shape.x + shape.width, shape.y + shape.height, shape.y)
                axes.imshow(shape.pixels, extent=box, interpolation="nearest", zorder=order, aspect="auto")
                axes.set(xlim=(0, figure.width), ylim=(figure.height, 0))
        sheet.savefig(path, dpi=SCALE * INCH, metadata={"Software": None})


def _rect(axes: Any, shape: Rect, order: int) -> None:
    from matplotlib.patches import Rectangle

    axes.add_patch(
        Rectangle(
            (shape.x, shape.y),
            shape.width,
            shape.height,
            facecolor=LIGHT["paper"] if shape.hatched else LIGHT[shape.fill] if shape.fill else "none",
            edgecolor=LIGHT[shape.outline] if shape.outline else "none",
            alpha=None if shape.strength == 1 else shape.strength,
            hatch="//////" if shape.hatched else None,
            linewidth=1.08 if shape.outline else 0,
            zorder=order,
        )
    )


def _line(axes: Any, shape: Polyline, order: int) -> None:
    across, down = zip(*shape.points, strict=True)
    style = (0, (5, 4)) if shape.dashed else "-"
    axes.plot(
        across,
        down,
        color=LIGHT[shape.color],
        lw=0.72 * shape.width,
        ls=style,
        alpha=None if shape.strength == 1 else shape.strength,
        zorder=order,
    )


def _words(axes: Any, shape: Label, order: int) -> None:
    axes.text(
        shape.x,
        shape.y,
        shape.text.replace("$", r"\$"),
        fontsize=0.72 * shape.size,
        color=LIGHT[shape.color],
        ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
        va="baseline",
        weight="bold" if shape.bold else "normal",
        zorder=order,
    )
