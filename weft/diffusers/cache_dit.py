"""cache-dit on a sharded model: one module of its own runs all blocks of a list, or some of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from inspect import getclosurevars
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.diffusers.module_hook import ModuleHook
from weft.hooks.step_cache import cache_dit_manager, share_decision, unshare_decision
from weft.hooks.wrap import WRAPPER, Args, Forward, Kwargs, is_outside, unwrap_module, wrap_module
from weft.run.comm import Comm

if TYPE_CHECKING:
    from weft.diffusers.region import ShardedRegion

CachedBlocks = Any
"""cache-dit's module in place of a list of blocks."""


class CachedBlocksHook(ModuleHook):
    """Split what the first block would split before cache-dit compares it; a probe runs all blocks."""

    def __init__(self, region: ShardedRegion, cached: CachedBlocks, prefix: str) -> None:
        self.cached, self.first = cached, region.wrapped.get(f"{prefix}.0", (None, None))[1]
        super().__init__(region, prefix)
        if self.first is None:  # tokens are split before
            return
        second = region.wrapped.get(f"{prefix}.1", (None, None))[1]
        every = second.inputs if second is not None else {}  # what each block splits by itself
        inputs, self.order = self.first.inputs, self.first.order
        self.inputs = {name: spec for name, spec in inputs.items() if name not in every}
        self.first.inputs = {name: spec for name, spec in inputs.items() if name in every}

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        is_probe = self.region.shards.probe_attention is not None
        return super().around(self._all_blocks if is_probe else forward, args, kwargs)

    def _all_blocks(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return self.cached._process_forward_outputs(*self.cached.call_blocks(*args, **kwargs))


def share_cache_dit(region: ShardedRegion, comm: Callable[[], Comm | None]) -> bool:
    """Let cache-dit decide by the tokens of all ranks; return whether it is on the model."""
    manager = cache_dit_manager(region.model)
    if manager is None:
        return False
    check_cache_dit(region.model)
    share_decision(manager, "similarity", comm)
    for prefix, cached in _cached_blocks(region.model):
        if not isinstance(vars(cached).get(WRAPPER), CachedBlocksHook):  # since `unshare_cache_dit`
            wrap_module(cached, CachedBlocksHook(region, cached, prefix))
    return True


def unshare_cache_dit(model: nn.Module) -> None:
    manager = cache_dit_manager(model)
    if manager is not None and is_outside(vars(model).get("forward")):
        unshare_decision(manager)
        for _, cached in _cached_blocks(model):
            unwrap_module(cached)


def check_cache_dit(model: nn.Module) -> None:
    """Refuse what cannot be shared of cache-dit: pruning, fits over tokens, and one that was enabled late."""
    manager = cache_dit_manager(model)
    if manager is None:
        return
    kind, contexts = type(manager).__name__, getattr(manager, "_cached_context_manager", {}).values()
    configs = [type(context.calibrator_config).__name__ for context in contexts]
    if not is_outside(vars(model).get("forward")):
        problem, hint = (
            "was enabled on a parallelized",
            "Call cache_dit.enable_cache before weft.parallelize.",
        )
    elif kind != "CachedContextManager" or any(name.startswith("DMD") for name in configs):
        problem = f"decides over tokens by a {kind} with {', '.join(configs) or 'no calibrator'} on a"
        hint = "Use DBCacheConfig, with TaylorSeerCalibratorConfig or without."
    else:
        return
    raise InputError(f"cache-dit {problem} {type(model).__name__}: ranks would differ.", hint=hint)


def _cached_blocks(model: nn.Module) -> Iterator[tuple[str, CachedBlocks]]:
    """Yield cache-dit's modules and the names of the lists that they stand for, which its forward knows."""
    outer = vars(model)["forward"].args[1]
    assert isinstance(outer, partial)
    known = getclosurevars(getclosurevars(outer.func).nonlocals["new_forward"]).nonlocals
    for prefix, name in zip(known["blocks_name"], known["unique_blocks_name"], strict=True):
        yield from ((prefix, cached) for cached in known["unified_blocks"][name])
