"""Enable a step cache by its name, as `--cache first-block:0.08`, on the transformers of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from weft.core.errors import InputError
from weft.generate.cache_spec import parse_cache
from weft.generate.pretrained import PretrainedPipeline
from weft.hooks.module_tree import unwrapped
from weft.hooks.step_cache import cache_dit_manager, cache_hooks

Config = Any
"""The configuration of a cache of Diffusers."""
Hooks = Any
"""The module `diffusers.hooks`."""


def _pyramid(hooks: Hooks, pipe: Any, value: float) -> Config:
    return hooks.PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=int(value),
        current_timestep_callback=lambda: pipe.current_timestep,
    )


CONFIGS: dict[str, Callable[[Hooks, Any, float], Config]] = {
    "first-block": lambda hooks, _, value: hooks.FirstBlockCacheConfig(threshold=value),
    "pab": _pyramid,
    "taylorseer": lambda hooks, _, value: hooks.TaylorSeerCacheConfig(cache_interval=int(value)),
}
"""The configurations of the names of `weft.generate.cache_spec`."""


def enable_cache(pipe: PretrainedPipeline, text: str) -> None:
    """Enable a cache on all transformers of a pipeline, instead of the one that they have."""
    name, value = parse_cache(text)
    disable_cache(pipe)
    for model in _transformers(pipe):
        if not hasattr(model, "enable_cache"):
            raise InputError(f"A {type(model).__name__} has no step caches.", hint="Leave out --cache.")
        model.enable_cache(CONFIGS[name](import_module("diffusers.hooks"), pipe, value))
        if not has_cache(pipe):
            raise InputError(f"The cache {name} finds none of its modules in a {type(model).__name__}.")


def disable_cache(pipe: PretrainedPipeline) -> None:
    for model in _transformers(pipe):
        if getattr(model, "is_cache_enabled", False):
            model.disable_cache()


def has_cache(pipe: PretrainedPipeline) -> bool:
    """Return whether a transformer of a pipeline has a step cache."""
    return any(
        cache_dit_manager(model) is not None or any(cache_hooks(model.modules()))
        for model in _transformers(pipe)
    )


def _transformers(pipe: PretrainedPipeline) -> list[Any]:
    models = [model for name, model in pipe.components.items() if "transformer" in name]
    return [unwrapped(model) for model in models if isinstance(model, nn.Module)]
