"""Modules of a package: what is one of many, a strategy, a mask, an adapter, is found by being there."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType


def modules(package: str) -> dict[str, ModuleType]:
    """By their names in it, in the order of those, imported.

    >>> "units" in modules("weft.core")
    True
    """
    folder = import_module(package).__path__
    return {
        name: import_module(f"{package}.{name}")
        for name in sorted(m.name for m in pkgutil.iter_modules(folder))
    }
