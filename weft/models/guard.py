"""Guard: what an adapter does not declare is refused: modules that look like an attention, processors of
which weft does not see the attention, random numbers of which one process would draw others.
"""  # noqa: D205

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from weft.core.errors import InputError
from weft.models.adapter import modules
from weft.models.attend import passed_on
from weft.models.randomness import DROPOUT, RANDOM

if TYPE_CHECKING:
    from weft.models.region import Region

SEEN = frozenset({"scaled_dot_product_attention", "dispatch_attention_fn"})


class Guard(TorchFunctionMode):
    """Refuses random numbers for this rank's tokens."""

    def __init__(self, region: Region) -> None:
        super().__init__()
        self.region = region

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in RANDOM or (func in DROPOUT and _drops(*args, **kwargs or {})):
            self._check()
        return passed_on(func, args, kwargs or {})

    def _check(self) -> None:
        # Sizes are read for these functions alone: torch.compile makes constants of what it sees read.
        if not self.region.quiet and self.region.shards.sizes:
            raise InputError(
                f"{_running(self.region.model)} draws random numbers for this rank's tokens only.",
                hint="Only nn.Dropout draws what one process would; use it, or draw before tokens are cut.",
            )


def _drops(_: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> bool:  # noqa: FBT001, FBT002, ARG001
    return bool(p) and training


def _running(model: nn.Module) -> str:
    """The innermost module that is running, by its name in the model."""
    names = {id(module): name for name, module in modules(model).items()}
    frame = sys._getframe(1)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, nn.Module) and names.get(id(value)):
                return names[id(value)]
        frame = frame.f_back
    return type(model).__name__


def refuse_undeclared(model: nn.Module, declared: list[str]) -> None:
    """Every module that looks like an attention must be declared, or lie in one that is."""
    for name, module in modules(model).items():
        looks = isinstance(module, nn.MultiheadAttention) or (
            hasattr(module, "to_q") and hasattr(module, "to_k")
        )
        if looks and not any(name == one or name.startswith(f"{one}.") for one in declared):
            raise InputError(
                f"{name} is an attention ({type(module).__name__}) that the adapter does not declare.",
                hint="Add it under attention, or under local if its keys are whole on every rank.",
            )


def check_processor(name: str, module: Any) -> None:
    """A processor must leave attention to a function that can be answered."""
    processor = getattr(module, "processor", None)
    code = (
        getattr(inspect.unwrap(type(processor).__call__), "__code__", None) if callable(processor) else None
    )
    if code is not None and not SEEN & set(code.co_names):
        raise InputError(
            f"{name} has a {type(processor).__name__}, which computes attention by itself.",
            hint="Set a processor that calls scaled_dot_product_attention, such as the model's default one.",
        )
