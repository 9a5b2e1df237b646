"""Find the modules of a model by name, behind the wrappers of torch.compile, checkpointing and peft."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar

from torch import nn
from torch.utils._pytree import PyTree

from weft.core.errors import InputError

T = TypeVar("T")

WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")
"""Where torch.compile and checkpoint_wrapper hold the inner module: not counted as components of a name."""
LAYER = "base_layer"
"""Where an adapter layer of peft holds the layer that it replaces."""


def unwrapped(model: T) -> T:
    """Return the module inside of torch.compile's or checkpoint_wrapper's."""
    children: dict[str, PyTree] = vars(model).get("_modules", {}) if isinstance(model, nn.Module) else {}
    for name in WRAPPERS:
        if name in children:
            return unwrapped(children[name])
    return model


def set_attribute(target: PyTree, name: str, value: PyTree) -> Callable[[], None]:
    """Set an attribute of an instance; return a function that restores what was there before."""
    own = vars(target)
    undo = partial(own.__setitem__, name, own[name]) if name in own else partial(own.pop, name, None)
    own[name] = value
    return undo


def forward_parameters(module: nn.Module) -> list[str]:
    """Return the names of a forward's arguments."""
    return list(inspect.signature(type(unwrapped(module)).forward).parameters)[1:]


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules by name: of a wrapped one the inner, of a layer of peft's the whole."""
    by_name: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        components = name.split(".")
        plain = ".".join(each for each in components if each not in (*WRAPPERS, LAYER))
        if plain not in by_name or components[-1] != LAYER:
            by_name[plain] = module
    return by_name


def module_at(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module that has a name of `modules` now."""
    for component in name.split("."):
        children: dict[str, PyTree] = model._modules
        if component not in children and LAYER in children:
            children = unwrapped(children[LAYER])._modules
        if (child := children.get(component)) is None:
            return None
        model = unwrapped(child)
    return model


def matching(model: nn.Module, pattern: str) -> list[tuple[str, nn.Module]]:
    """Return the modules that match a pattern, in the model's order; raise if none does."""
    matches = list(named(model, pattern))
    if not matches:
        raise no_module(model, repr(pattern))
    return matches


def named(model: nn.Module, pattern: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that match a pattern, in which * is any one component of a name, and -1 the last."""
    by_name, patterns = modules(model), pattern.split(".")
    while "-1" in patterns:
        at = patterns.index("-1")
        children = getattr(by_name.get(".".join(patterns[:at])), "_modules", {})
        patterns[at] = str(len(children) - 1)
    for name, module in by_name.items():
        components = name.split(".")
        if len(components) == len(patterns) and all(map(fnmatchcase, components, patterns)):
            yield name, module


def no_module(model: nn.Module, pattern: str) -> InputError:
    near = get_close_matches(pattern.strip("'").replace("*", "0"), modules(model), cutoff=0.3)
    return InputError(
        f"A {type(unwrapped(model)).__name__} has no module {pattern}.",
        hint=(f"Did you mean {', '.join(near)}? " if near else "")
        + "In a pattern * is any one component of a name; print(model) lists them.",
    )
