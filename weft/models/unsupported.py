"""What a parallelized model cannot be called with: refused by name, before it is computed on a part of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from inspect import signature
from typing import Any

from torch import nn

from weft.core.errors import InputError
from weft.core.schedule import Schedule
from weft.models.adapter import Adapter, unwrapped
from weft.models.guidance import Guidance
from weft.plan.choose import Plan
from weft.plan.place import Planned
from weft.plan.strategies import parse
from weft.run.call import schedule_of


def refuse_caches(model: nn.Module, parts: Iterable[nn.Module]) -> None:
    """Refuse the caches of Diffusers': by `enable_cache`, or by one of the `apply_*` of `diffusers.hooks`."""
    hooks = (vars(part)["_diffusers_hook"].hooks for part in parts if "_diffusers_hook" in vars(part))
    stateful = (
        (name, type(hook))
        for each in hooks
        for name, hook in each.items()
        if hook._is_stateful and type(hook).__module__.startswith("diffusers.")
    )
    name, kind = next(stateful, ("", None))
    is_enabled = getattr(model, "is_cache_enabled", False)
    if kind is None and not is_enabled:
        return
    removal = f"HookRegistry.check_if_exists_or_initialize(model).remove_hook({name!r}, recurse=True)"
    raise InputError(
        f"A cache of Diffusers'{f', a {kind.__name__},' if kind else ''} is enabled on this "
        f"{type(model).__name__}: each rank would decide by its own tokens what to compute.",
        hint=f"Call {'disable_cache() on it' if is_enabled else removal}.",
    )


def refuse_arguments(adapter: Adapter, model: nn.Module, given: Mapping[str, Any]) -> None:
    """Refuse arguments that the adapter neither cuts nor lists as whole, where they are not the defaults.

    A subclass of the user's may have more arguments; what those do is seen in the forward.
    """
    if adapter.whole is None:
        return
    for name in given.keys() - adapter.whole.union(adapter.inputs.get("", ())):
        value, default = given[name], _defaults(type(unwrapped(model)), adapter.model).get(name, given[name])
        if value is None or value is default or (isinstance(value, int | float | str) and value == default):
            continue
        raise InputError(
            f"This {type(model).__name__} was called with {name}, which weft cannot split.",
            hint=f"Leave {name} out, or call the model on one rank.",
        )


@lru_cache
def _defaults(kind: type[nn.Module], name: str) -> dict[str, Any]:
    """The arguments of the forward that an adapter was written for."""
    written_for = [base for base in kind.__mro__ if base.__name__ == name][-1:]
    return {
        key: each.default for base in written_for for key, each in signature(base.forward).parameters.items()
    }


def _misfit(plan: Any, ranks: int) -> InputError | None:
    """Why a plan is none for so many ranks."""
    try:
        if isinstance(plan, str):
            if plan != "auto":
                parse(plan, ranks)
        elif (needed := schedule_of(plan).attention[0].ranks) != ranks:
            return InputError(f"The plan is for {needed} ranks, this world has {ranks}.")
    except InputError as error:
        return error
    return None


def check_plan(plan: Any, ranks: int, guidance: Guidance, *, asked: str) -> None:
    """Refuse a plan that does not fit the ranks, or halves of them, on which no forward could run.

    Guidance that was not asked for is left out if the plan has no halves.
    """
    if not isinstance(plan, str | Plan | Planned | Schedule):
        raise InputError(
            f"plan={plan!r} is a {type(plan).__name__}.",
            hint="Give the name of a strategy such as ulysses, or what `weft.plan` returns.",
        )
    whole = _misfit(plan, ranks)
    half = whole if guidance.halves is None else _misfit(plan, ranks // 2)
    if half is not None and (whole is not None or asked == "on"):
        raise whole or half
    if half is not None:
        guidance.halves = None
