"""Explanation: the plans that the layers of a model ran by, why, and what they gained."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

from weft.core import tables
from weft.core.files import parse_json, read_bytes

MAX_BYTES = 16 << 20


@dataclass(frozen=True)
class LayerPlan:
    """The attention of a layer: means over its steps, of the plans in force and of its first plan kept."""

    model: str
    layer: int
    branch: int
    plan: str
    why: str
    changed: int
    """How often heads or blocks were assigned anew."""
    imbalance: float | None
    """max / mean of the ranks' work."""
    imbalance_static: float | None
    gain: float | None
    """Times that all steps would take longer by the first plan, by the same costs."""

    @property
    def place(self) -> str:
        return f"{self.layer}/{self.branch}" if self.branch else str(self.layer)

    @property
    def numbers(self) -> list[str]:
        """As they are shown: imbalance, that of the first plan, and the gain."""
        values = self.imbalance, self.imbalance_static, self.gain
        return ["–" if value is None else f"{value:.3f}" for value in values]


@dataclass(frozen=True)
class Explanation:
    """By layer, those whose masks change; `fixed` are the plans of all other attentions."""

    layers: tuple[LayerPlan, ...]
    fixed: tuple[str, ...]

    @property
    def gain(self) -> float | None:
        gains = [layer.gain for layer in self.layers if layer.gain]
        return fmean(gains) if gains else None

    @staticmethod
    def load(path: Path) -> Explanation:
        """Read what `json` wrote, or anybody else."""
        return tables.read(Explanation, parse_json(read_bytes(path, limit=MAX_BYTES), path.name), path.name)

    def json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        lines = [f"{plan}: dense attention, and masks that stay" for plan in self.fixed]
        if self.layers:
            lines.append(f"{'layer':>5}  {'plan':<22} {'imbalance':>9}  {'static':>6}  {'gain':>6}  changed")
        for each in self.layers:
            now, static, gain = each.numbers
            row = f"{each.place:>5}  {each.plan:<22} {now:>9}  {static:>6}  {gain:>6}  {each.changed:>7}"
            lines.append(row)
        reasons = dict.fromkeys(layer.why for layer in self.layers)
        return "\n".join([*lines, *reasons]) or "No attention has run yet."
