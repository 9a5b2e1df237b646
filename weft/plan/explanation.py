"""Explanation: which plan each attention layer of a model ran, why, and how much time that saved."""

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
    """Plans of one attention layer; numbers are means over steps, `static` ones if its first plan stayed."""

    model: str
    layer: int
    branch: int
    plan: str
    why: str
    changed: int
    """Number of times that heads or blocks were reassigned to ranks."""
    imbalance: float | None
    """max / mean of the ranks' work."""
    imbalance_static: float | None
    gain: float | None
    """Predicted time of all steps with the first plan / with the plans used, by the same cost model."""

    @property
    def place(self) -> str:
        return f"{self.layer}/{self.branch}" if self.branch else str(self.layer)

    @property
    def numbers(self) -> list[str]:
        """Table cells: the imbalance, the imbalance of the first plan, and the gain."""
        values = self.imbalance, self.imbalance_static, self.gain
        return ["–" if value is None else f"{value:.3f}" for value in values]


@dataclass(frozen=True)
class Explanation:
    """`layers` are the attention layers whose masks change; `fixed` are the plans of all others."""

    layers: tuple[LayerPlan, ...]
    fixed: tuple[str, ...]

    @property
    def gain(self) -> float | None:
        gains = [layer.gain for layer in self.layers if layer.gain]
        return fmean(gains) if gains else None

    @staticmethod
    def load(path: Path) -> Explanation:
        """Read and validate an untrusted file in the format of `json`."""
        return tables.read(Explanation, parse_json(read_bytes(path, limit=MAX_BYTES), path.name), path.name)

    def json(self) -> str:
        return json.dumps(asdict(self))

    def __str__(self) -> str:
        lines = [f"{plan}: dense attention, and masks that stay" for plan in self.fixed]
        if self.layers:
            lines.append(f"{'layer':>5}  {'plan':<22} {'imbalance':>9}  {'static':>6}  {'gain':>6}  changed")
        for layer in self.layers:
            ratio, static, gain = layer.numbers
            row = f"{layer.place:>5}  {layer.plan:<22} {ratio:>9}  {static:>6}  {gain:>6}  {layer.changed:>7}"
            lines.append(row)
        reasons = dict.fromkeys(layer.why for layer in self.layers)
        return "\n".join([*lines, *reasons]) or "No attention has run yet."
