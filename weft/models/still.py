"""Still: run a model for a probe so that nothing is left of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from weft.models.randomness import STATES

SMALL_BUFFER = 1 << 20
"""Elements of a buffer that may hold statistics: probes get a copy of it."""
LIBRARIES = ("torch", "diffusers", "accelerate", "peft", "transformers", "torchao", "bitsandbytes", "weft")
"""Whose hooks models cannot run without, as those that move weights; others are left out."""


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Run a model so that nothing is left of it: no gradients, statistics, random numbers, compiled code.

    Dropout does nothing; hooks are called if they are of a library.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(_numbers_kept())
        # Weights that autocast keeps would have no gradients later.
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
                if others := {key: hook for key, hook in hooks.items() if not _is_of_library(hook)}:
                    stack.callback(_put_back, hooks, dict(hooks))
                    for key in others:
                        del hooks[key]
        yield


@contextmanager
def _numbers_kept() -> Iterator[None]:
    on_gpu = torch.cuda.is_initialized()
    with STATES:
        state, cuda = torch.get_rng_state(), torch.cuda.get_rng_state() if on_gpu else None
    try:
        yield
    finally:
        with STATES:
            torch.set_rng_state(state)
            if cuda is not None:
                torch.cuda.set_rng_state(cuda)


def _put_back(hooks: dict[int, Any], all_hooks: dict[int, Any]) -> None:
    """In their order."""
    hooks.clear()
    hooks.update(all_hooks)


def _is_of_library(hook: Any) -> bool:
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.partition(".")[0] in LIBRARIES
