"""Step caches of Diffusers on a model whose tokens are sharded: hooks that skip modules in some steps.

Most decide by the number of the step. Where one decides by its tokens, the method that does runs under
`WholeReductions`: a mean is that of the tokens of all ranks, so that all ranks decide as one process does.
What else a cache does to tokens it does to each by itself, on this rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.hooks.wrap import (
    WRAPPER,
    Args,
    Forward,
    ForwardWrapper,
    FunctionMode,
    Kwargs,
    run_function,
    unwrap_module,
    wrap_module,
)
from weft.run.comm import Comm

CACHE_HOOKS = {
    "FBCHeadBlockHook": "_should_compute_remaining_blocks",
    "FBCBlockHook": "",
    "PyramidAttentionBroadcastHook": "",
    "FasterCacheDenoiserHook": "",
    "FasterCacheBlockHook": "",
    "MagCacheHeadHook": "",
    "MagCacheBlockHook": "_perform_calibration_step",
    "TaylorSeerCacheHook": "",
}
"""Hooks of Diffusers that work on sharded tokens, and the method of each that reduces over tokens."""
MIXING = {
    "SeaCacheRootHook": "decides by frequencies of all tokens",
    "TextKVCacheTransformerHook": "keeps keys of text that attention then takes for this rank's own",
}
"""Hooks that do not, and why."""
REGISTRY = "_diffusers_hook"
Hook = Any
"""A hook of Diffusers, which has no protocol."""


class CacheHook(NamedTuple):
    """A step cache's hook on a module, by its name in the module's registry."""

    module: nn.Module
    name: str
    hook: Hook

    @property
    def kind(self) -> str:
        return type(self.hook).__name__


def cache_hooks(modules: Iterable[nn.Module]) -> Iterator[CacheHook]:
    """Yield the hooks of step caches: those that are known, and all of Diffusers' that keep a state."""
    for module in modules:
        registry = vars(module).get(REGISTRY)
        for name, hook in registry.hooks.items() if registry is not None else ():
            kinds = [kind for kind in type(hook).__mro__ if kind.__module__.startswith("diffusers.hooks.")]
            is_cache = hook._is_stateful or any(kind.__name__ in CACHE_HOOKS for kind in kinds)
            if is_cache and kinds[0].__name__ != "ModelHook":  # else it is a hook of the user's own
                yield CacheHook(module, name, hook)


def cache_dit_manager(model: nn.Module) -> Hook | None:
    """Return the object with which cache-dit decides for a model."""
    manager = vars(model).get("_context_manager")
    return manager if type(manager).__module__.startswith("cache_dit.") else None


def check_cache(cache: CacheHook) -> None:
    """Refuse a cache that is not known to treat each token by itself."""
    plain = getattr(type(cache.hook), "_weft_plain", type(cache.hook))
    if plain.__name__ in CACHE_HOOKS and plain.__module__.startswith("diffusers.hooks."):
        return
    reason = MIXING.get(plain.__name__, "is not known to treat each token by itself")
    raise InputError(
        f"A {plain.__name__} is on a {type(cache.module).__name__}: this cache {reason}.",
        hint="Call disable_cache() on the model, or HookRegistry.check_if_exists_or_initialize(model)."
        f"remove_hook({cache.name!r}, recurse=True).",
    )


@contextmanager
def without_caches(model: nn.Module) -> Iterator[None]:
    """Run all modules as if they had no step cache; the caches keep their state."""
    with ExitStack() as stack:
        for *_, hook in cache_hooks(model.modules()):
            if (reference := hook.fn_ref).original_forward is not None:
                stack.callback(setattr, reference, "forward", reference.forward)
                reference.forward = reference.original_forward
        yield


def register_derived_blocks() -> None:
    """From now on, Diffusers knows a block of a class of its own while weft wraps it.

    Caches that are applied to a parallelized model look up by class which of a block's outputs is which.
    """
    registry = import_module("diffusers.hooks._helpers").TransformerBlockRegistry
    plain: Forward = registry.get.__func__
    if hasattr(plain, "_weft"):
        return

    def get(cls: type, kind: type) -> PyTree:
        return plain(cls, getattr(kind, "_weft_plain", kind))

    vars(get)["_weft"] = True
    registry.get = classmethod(get)


class WholeReductions(FunctionMode):
    """Means and sums over all elements are those of the tensors of all ranks.

    They are added in float64 in the order of the ranks. A tensor that every rank has whole keeps its mean.
    """

    functions = frozenset({torch.mean, Tensor.mean, torch.sum, Tensor.sum})

    def __init__(self, comm: Comm) -> None:
        super().__init__()
        self.comm = comm

    def call(self, func: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        x = args[0] if args else kwargs["input"]
        if len(args) > 1 or kwargs.keys() - {"input"}:  # over channels
            return run_function(func, args, kwargs)
        total, count = self._add(x.detach().sum(dtype=torch.float64).item(), float(x.numel()))
        whole = total / count if func in (torch.mean, Tensor.mean) else total
        return x.new_tensor(whole)

    def _add(self, *numbers: float) -> list[float]:
        """Return the sums over ranks."""
        bits = torch.tensor(numbers, dtype=torch.float64).view(torch.int64).tolist()
        rows = torch.tensor(self.comm.all_gather_ints(bits), dtype=torch.int64).view(torch.float64)
        return [sum(column) for column in zip(*rows.tolist(), strict=True)]


class Decision(ForwardWrapper):
    """Runs the method of a cache that reduces over tokens, with the tokens of all ranks."""

    opaque = True

    def __init__(self, method: str, comm: Callable[[], Comm | None]) -> None:
        self.method, self.comm = method, comm

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        comm = self.comm()
        if comm is None:
            return forward(*args, **kwargs)
        if "parallelized" in kwargs:  # cache-dit would average over all processes
            kwargs = {**kwargs, "parallelized": False}
        with WholeReductions(comm):
            return forward(*args, **kwargs)


def share_decision(target: Hook, method: str, comm: Callable[[], Comm | None]) -> None:
    """Let a method of a cache reduce over the tokens of all ranks; `comm()` is None if nothing is split."""
    wrapper = vars(target).get(WRAPPER)
    if not isinstance(wrapper, Decision) or wrapper.comm != comm:
        wrap_module(target, Decision(method, comm))


def unshare_decision(target: Hook) -> None:
    if isinstance(vars(target).get(WRAPPER), Decision):
        unwrap_module(target)
