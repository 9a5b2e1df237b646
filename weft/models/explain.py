"""`weft.explain`: the plans that a parallelized pipeline's attentions run by, why, and what they gain.

pipe("a loom at work")
print(weft.explain(pipe))            # on rank 0, which plans; others know the plans, not what they gain
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import Any

from weft.core.errors import InputError
from weft.plan.explanation import Explanation, LayerPlan
from weft.run.planner import Entry


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
    return explained(woven, wait=wait)


def explained(woven: Any, *, wait: bool = True) -> Explanation:
    """Explain what `parallelize` put on, by the worlds that it has run on."""
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
        why=entry.plan.why,
        changed=entry.plan.version,
        imbalance=_mean(each.imbalance for each in judged),
        imbalance_static=_mean(each.imbalance_static for each in judged),
        gain=static / taken if taken else None,
    )


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return fmean(found) if found else None
