"""`weft.explain`: the plans of a parallelized pipeline's attentions, the reasons for them, and their gain.

pipe("a loom at work")
print(weft.explain(pipe))            # on rank 0, which plans; other ranks have the plans, not their gain
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import fmean
from typing import TYPE_CHECKING

from weft.core.errors import InputError
from weft.hooks.wrap import Target
from weft.plan.explanation import Explanation, LayerPlan
from weft.run.planner import Entry

if TYPE_CHECKING:
    from weft.diffusers.handle import ParallelHandle


def explain(target: Target, *, wait: bool = True) -> Explanation:
    """Return how the attentions of a parallelized pipeline or model are split, for each layer.

    Times are predicted by the costs of the topology, which `weft calibrate` measures. `wait`: for plans that
    are being made.

    >>> import weft
    >>> from weft.video.transformer import DiTConfig, VideoDiT
    >>> model = VideoDiT(DiTConfig(words=8, length=2, depth=1))
    >>> print(explain(weft.parallelize(model)))
    No attention has run yet.
    """
    handle = getattr(target, "_weft", None)
    if handle is None:
        raise InputError(
            f"This {type(target).__name__} is not parallelized.", hint="Call weft.parallelize on it first."
        )
    return explained(handle, wait=wait)


def explained(handle: ParallelHandle, *, wait: bool = True) -> Explanation:
    """Explain the attentions of a handle, by the worlds that they have run on."""
    layers: list[LayerPlan] = []
    fixed: dict[str, None] = {}
    for world, model in handle.worlds():
        if wait:
            world.planner.finish()
        entries = [entry for entry in world.planner.entries.values() if entry.place.model == model]
        layers += map(_layer, sorted(entries, key=lambda entry: entry.place))
        planned = {entry.plan.schedule.name for entry in entries}
        for executor in world.executors.values():
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
    numbers = list(values)
    return fmean(numbers) if numbers else None
