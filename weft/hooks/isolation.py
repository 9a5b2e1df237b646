"""Run a model without side effects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from weft.hooks.rng import RNG_LOCK
from weft.hooks.step_cache import without_caches
from weft.hooks.wrap import Forward

SMALL_BUFFER = 1 << 20
"""Elements of a buffer that may hold statistics: probes get a copy of it."""
LIBRARIES = ("torch", "diffusers", "accelerate", "peft", "transformers", "torchao", "bitsandbytes", "weft")
"""Hooks of these stay: models cannot run without, for example, those that move weights."""


@contextmanager
def isolated(model: nn.Module) -> Iterator[None]:
    """Run a model without side effects: no gradients, statistics, random numbers, compiled code.

    Dropout and step caches do nothing; hooks are called if they are of a library.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_rng_restored())
        stack.enter_context(without_caches(model))
        # Autocast would cache weights cast without gradients, and reuse them in training.
        stack.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training:
                stack.callback(setattr, module, "training", module.training)
                module.training = False
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.numel() <= SMALL_BUFFER:
                    stack.callback(module._buffers.__setitem__, name, buffer)
                    module._buffers[name] = buffer.clone()
            for hooks in (module._forward_hooks, module._forward_pre_hooks):
                if others := [key for key, hook in hooks.items() if not _is_of_library(hook)]:
                    stack.callback(hooks.update, dict(hooks))
                    stack.callback(hooks.clear)  # undone last-in first-out: clear, then restore in order
                    for key in others:
                        del hooks[key]
        yield


@contextmanager
def _rng_restored() -> Iterator[None]:
    on_gpu = torch.cuda.is_initialized()
    with RNG_LOCK:
        state, cuda = torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None
    try:
        yield
    finally:
        with RNG_LOCK:
            torch.set_rng_state(state)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)


def _is_of_library(hook: Forward) -> bool:
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] in LIBRARIES
