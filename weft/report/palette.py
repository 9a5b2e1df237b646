"""Colors by name, light and dark: the Okabe-Ito palette for ranks, and a few for paper and ink.

Black is replaced by gray, which is visible on white and on black.
"""

from __future__ import annotations

LIGHT = {
    "paper": "#ffffff",
    "panel": "#f4f4f2",
    "ink": "#1c1c1a",
    "muted": "#6a6a64",
    "rule": "#d9d9d4",
    "alarm": "#b3261e",
    "black": "#000000",
    "white": "#ffffff",
    "c0": "#e69f00",
    "c1": "#56b4e9",
    "c2": "#009e73",
    "c3": "#f0e442",
    "c4": "#0072b2",
    "c5": "#d55e00",
    "c6": "#cc79a7",
    "c7": "#808080",
}
DARK = LIGHT | {
    "paper": "#161615",
    "panel": "#232321",
    "ink": "#ecebe6",
    "muted": "#a3a29b",
    "rule": "#3d3d39",
    "alarm": "#ff8a80",
}
EIGHT = 8


def rank_color(rank: int, ranks: int, machines: int = 1) -> tuple[str, float]:
    """Return the color and opacity of a rank: one color per rank up to eight, then one per machine."""
    if ranks <= EIGHT:
        return f"c{rank}", 1.0
    devices = max(1, ranks // max(1, machines))
    place = rank % devices
    return f"c{rank // devices % EIGHT}", round(1.0 - 0.6 * place / max(1, devices - 1), 3)


def on_color(name: str, strength: float) -> str:
    """Return the text color on top of a rank color."""
    if strength < 0.7:
        return "ink"
    return {"c2": "white", "c4": "white", "c5": "white", "c7": "white"}.get(name, "black")


def rgb(name: str, strength: float = 1.0) -> tuple[int, int, int]:
    """Return a color of the light theme, for images without a style sheet."""
    red, green, blue = (int(LIGHT[name][i : i + 2], 16) for i in (1, 3, 5))
    return (
        round(255 + (red - 255) * strength),
        round(255 + (green - 255) * strength),
        round(255 + (blue - 255) * strength),
    )


def style_sheet(selector: str = ":root") -> str:
    """Return the colors as CSS variables that follow the preferred color scheme."""

    def block(table: dict[str, str]) -> str:
        return selector + "{" + "".join(f"--{name}:{value};" for name, value in table.items()) + "}"

    changed = {name: value for name, value in DARK.items() if LIGHT[name] != value}
    return f"{block(LIGHT)}@media(prefers-color-scheme:dark){{{block(changed)}}}"
