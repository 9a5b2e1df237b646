"""Raise errors for what a parallelized model cannot compute, before it runs."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from functools import lru_cache

from torch import nn
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.core.schedule import Schedule
from weft.diffusers.adapter import Adapter
from weft.diffusers.guidance import Guidance
from weft.hooks.module_tree import modules, unwrapped
from weft.plan.choose import Plan
from weft.plan.place import Planned
from weft.plan.strategies import parse
from weft.run.call import schedule_of

ATTENTION_FUNCTIONS = frozenset({"scaled_dot_product_attention", "dispatch_attention_fn"})
"""Functions of attention that weft intercepts."""


def check_declared(model: nn.Module, declared: Collection[str]) -> None:
    """Require that every module that looks like an attention is declared, or inside of one that is."""
    for name, module in modules(model).items():
        is_attention = isinstance(module, nn.MultiheadAttention) or (
            hasattr(module, "to_q") and hasattr(module, "to_k")
        )
        if is_attention and not any(name == one or name.startswith(f"{one}.") for one in declared):
            raise InputError(
                f"{name} is an attention ({type(module).__name__}) that the adapter does not declare.",
                hint="Add it under attention, or under local if its keys are whole on every rank.",
            )


def check_processor(name: str, module: nn.Module) -> None:
    """Require that a processor calls an attention function that weft intercepts."""
    processor = getattr(module, "processor", None)
    code = (
        getattr(inspect.unwrap(type(processor).__call__), "__code__", None) if callable(processor) else None
    )
    if code is not None and not ATTENTION_FUNCTIONS & set(code.co_names):
        raise InputError(
            f"{name} has a {type(processor).__name__}, which computes attention by itself.",
            hint="Set a processor that calls scaled_dot_product_attention, such as the model's default one.",
        )


def running_module(model: nn.Module) -> str:
    """Return the innermost module that is running, by its name in the model."""
    names = {id(module): name for name, module in modules(model).items()}
    frame = sys._getframe(1)
    while frame is not None:
        for value in list(frame.f_locals.values()):
            if isinstance(value, nn.Module) and names.get(id(value)):
                return names[id(value)]
        frame = frame.f_back
    return type(model).__name__


def check_arguments(adapter: Adapter, model: nn.Module, arguments: Mapping[str, PyTree]) -> None:
    """Reject arguments that the adapter neither splits nor replicates, unless they are defaults.

    A subclass of the user's may have more arguments; their effect shows in the forward.
    """
    if adapter.replicated is None:
        return
    for name in arguments.keys() - adapter.replicated.union(adapter.inputs.get("", ())):
        value = arguments[name]
        default = _defaults(type(unwrapped(model)), adapter.model).get(name, value)
        if value is None or value is default or (isinstance(value, int | float | str) and value == default):
            continue
        raise InputError(
            f"This {type(model).__name__} was called with {name}, which weft cannot split.",
            hint=f"Leave {name} out, or call the model on one rank.",
        )


@lru_cache
def _defaults(kind: type[nn.Module], name: str) -> dict[str, PyTree]:
    """Return the defaults of the forward that an adapter was written for."""
    written_for = [base for base in kind.__mro__ if base.__name__ == name][-1:]
    return {
        key: each.default
        for base in written_for
        for key, each in inspect.signature(base.forward).parameters.items()
    }


PlanSpec = str | Plan | Planned | Schedule


def check_plan(plan: PlanSpec, ranks: int, guidance: Guidance, *, cfg: str) -> None:
    """Reject a plan that does not fit the ranks, or halves of them, on which no forward could run.

    With cfg="auto", guidance is not split if the plan has no halves.
    """
    if not isinstance(plan, PlanSpec):
        raise InputError(
            f"plan must be a name, a Plan or a Schedule, got {plan!r}, a {type(plan).__name__}.",
            hint="Pass the name of a strategy such as ulysses, or what `weft.plan` returns.",
        )
    if guidance.halves is not None:
        try:
            _check_ranks(plan, ranks // 2)
        except InputError:
            if cfg == "on":
                raise
            guidance.halves = None
    if guidance.halves is None:
        _check_ranks(plan, ranks)


def _check_ranks(plan: PlanSpec, ranks: int) -> None:
    if isinstance(plan, str):
        if plan != "auto":
            parse(plan, ranks)
    elif (needed := schedule_of(plan).attention[0].ranks) != ranks:
        raise InputError(f"The plan is for {needed} ranks, this world has {ranks}.")
