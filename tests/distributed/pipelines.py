"""What tests of whole pipelines have a rank do; without ranks, it is what one process does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import weft
from tests.diffusers.checkpoints import TINY, arguments, diffusers
from weft.run.spawn.pool_rank import PRELOAD

diffusers.logging.set_verbosity_error()
for name in ("AllegroPipeline", "FluxPipeline", "HunyuanVideoPipeline", "LTXPipeline", "WanPipeline"):
    getattr(diffusers, name)  # they are imported when asked for, and much of what the others need with them
if __name__ not in PRELOAD:
    PRELOAD.append(__name__)  # once, not once in each rank: it takes seconds


@dataclass(frozen=True)
class Case:
    """One call of a pipeline."""

    branches: int = 2
    """Of guidance."""
    cfg: str = "auto"
    seeds: tuple[int, ...] = ()
    """Of generators that are passed; more than one, as a list."""
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def alone(self) -> Case:
        return replace(self, cfg="off")


@cache
def pipeline(name: str) -> Any:
    """Made once in each process."""
    return TINY[name]()


def call(pipe: Any, name: str, case: Case, rank: int = 0) -> Tensor:
    """Latents. Ranks have different seeds, of which the first one's counts."""
    given = {**arguments(name, branches=case.branches), **case.more}
    generators = [torch.Generator().manual_seed(seed + rank) for seed in case.seeds]
    if generators:
        given["generator"] = generators if len(generators) > 1 else generators[0]
    torch.manual_seed(5 + 7 * rank)
    return pipe(**given)[0]


def generate(name: str, cases: Sequence[Case], options: dict[str, Any] | None = None) -> list[Tensor]:
    """Each case with a pipeline that is parallelized for it, if there are ranks."""
    pipe, outs = pipeline(name), list[Tensor]()
    if not dist.is_initialized():
        return [call(pipe, name, case) for case in cases]
    for case in cases:
        weft.parallelize(pipe, cfg=case.cfg, **(options or {}))
        try:
            outs.append(call(pipe, name, case, dist.get_rank()))
        finally:
            weft.restore(pipe)
    return outs


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


Look = dict[str, Any]


def look(pipe: Any) -> Look:
    """All that could be left behind on a pipeline: classes, attributes, hooks, of all of its modules."""
    seen: Look = {"": (type(pipe), [key for key in vars(pipe) if "weft" in key])}
    for name, part in pipe.components.items():
        seen |= look_at(part, name) if isinstance(part, nn.Module) else {}
    return seen


def look_at(model: nn.Module, name: str = "") -> Look:
    """Of a model."""
    both = {key: (module, getattr(module, "processor", None)) for key, module in model.named_modules()}
    return {f"{name}.{key}": [(type(x), _attributes(x)) for x in pair] for key, pair in both.items()}


def changes(before: Look, after: Look) -> list[str]:
    both = ((key, before.get(key), after.get(key)) for key in {**before, **after})
    return [f"{key}: {was}, now {now}" for key, was, now in both if was != now]


def _attributes(thing: Any) -> Look:
    """Dicts, such as those of hooks, by what is in them; settings by value; what models note by type."""
    return {
        key: {k: id(v) for k, v in value.items()} if isinstance(value, dict)
        else value if isinstance(value, bool | int | float | str)
        else (id(value.__func__), id(value.__self__)) if isinstance(value, MethodType)  # made anew
        else id(value) if callable(value)
        else type(value)
        for key, value in getattr(thing, "__dict__", {}).items()
        if key != "_diffusers_hook"  # made by pipelines that name their branches
    }  # fmt: skip
