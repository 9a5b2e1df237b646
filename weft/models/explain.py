"""`weft.explain`: the plans that a parallelized pipeline's attentions run by, why, and what they gain.

pipe("a loom at work")
print(weft.explain(pipe))            # on rank 0, which plans; others know the plans, not what they gain
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from weft.core.errors import InputError
from weft.run.planner import Entry


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


@dataclass(frozen=True)
class Explanation:
    """By layer, those whose masks change; `fixed` are the plans of all other attentions."""

    layers: tuple[LayerPlan, ...]
    fixed: tuple[str, ...]

    @property
    def gain(self) -> float | None:
        gains = [layer.gain for layer in self.layers if layer.gain]
        return fmean(gains) if gains else None

    def as_json(self) -> dict[str, Any]:
        layers = [asdict(layer) for layer in self.layers]
        return {"layers": layers, "fixed": list(self.fixed), "gain": self.gain}

    def __str__(self) -> str:
        lines = [f"{plan}: dense attention, and masks that stay" for plan in self.fixed]
        if self.layers:
            lines.append(f"{'layer':>5}  {'plan':<22} {'imbalance':>9}  {'static':>6}  {'gain':>6}  changed")
        for each in self.layers:
            name = f"{each.layer}" if not each.branch else f"{each.layer}/{each.branch}"
            values = each.imbalance, each.imbalance_static, each.gain
            now, static, gain = ("–" if value is None else f"{value:.3f}" for value in values)
            lines.append(f"{name:>5}  {each.plan:<22} {now:>9}  {static:>6}  {gain:>6}  {each.changed:>7}")
        reasons = dict.fromkeys(layer.why for layer in self.layers)
        return "\n".join([*lines, *reasons]) or "No attention has run yet."


def explain(target: Any, *, wait: bool = True) -> Explanation:
    """Return how the attentions of a parallelized pipeline or model are split, for each layer.

    Times are predicted by the costs of the topology, which `weft calibrate` measures. `wait`: until what is
    being planned is planned.
    """
    woven = getattr(target, "_weft", None)
    if woven is None:
        raise InputError(
            f"This {type(target).__name__} is not parallelized.", hint="Call weft.parallelize on it first."
        )
    layers: list[LayerPlan] = []
    fixed: dict[str, None] = {}
    for world, model in woven.worlds():
        if wait:
            world.planner.finish()
        entries = [entry for entry in world.planner.entries.values() if entry.place.model == model]
        layers += map(_layer, sorted(entries, key=lambda entry: entry.place))
        planned = {entry.plan.schedule.name for entry in entries}
        for executor in world.compiled.values():
            if executor.schedule.name not in planned:
                fixed[executor.schedule.name] = None
    return Explanation(tuple(layers), tuple(fixed))


def _layer(entry: Entry) -> LayerPlan:
    judged, place = entry.judged, entry.place
    taken, static = (sum(getattr(each, name) for each in judged) for name in ("seconds", "seconds_static"))
    return LayerPlan(
        model=place.model,
        layer=place.layer,
        branch=place.branch,
        plan=str(entry.plan.strategy),
        why=entry.why,
        changed=entry.plan.version,
        imbalance=_mean(each.imbalance for each in judged),
        imbalance_static=_mean(each.imbalance_static for each in judged),
        gain=static / taken if taken else None,
    )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
