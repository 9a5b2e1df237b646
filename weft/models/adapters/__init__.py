"""Adapters of the models in Diffusers and of weft's own; `weft models` lists them.

A file of this folder has `ADAPTERS`, and is found by itself. Where a model has a `_cp_plan` of Diffusers' own
that splits what weft splits, its adapter only says the rest.
"""

from __future__ import annotations

from typing import Any

from weft.core.errors import InputError
from weft.core.modules import modules
from weft.models import dit
from weft.models.adapter import Adapter, unwrapped


def found() -> dict[str, Adapter]:
    """By the name of the class."""
    known = [adapter for module in modules(__name__).values() for adapter in module.ADAPTERS]
    return {adapter.model: adapter for adapter in (*known, dit.ADAPTER)}


ADAPTERS = found()


def knows(model: Any) -> Adapter | None:
    """The adapter of a model's class, or of one it is derived from."""
    names = [base.__name__ for base in type(unwrapped(model)).__mro__]
    return next((ADAPTERS[name] for name in names if name in ADAPTERS), None)


def adapter_of(model: Any) -> Adapter:
    if (adapter := knows(model)) is not None:
        return adapter
    raise InputError(
        f"weft has no adapter for a {type(unwrapped(model)).__name__}.",
        hint="Declare one, weft.parallelize(model, adapter=weft.Adapter(…)): docs/models.md shows how in 20 "
        f"lines. Known are {', '.join(ADAPTERS)}.",
    )
