"""Modules: discover strategies, masks and adapters as the modules of their package."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType


def modules(package: str) -> dict[str, ModuleType]:
    """Import the modules of a package; return them by name, sorted.

    >>> "units" in modules("weft.core")
    True
    """
    folder = import_module(package).__path__
    return {
        name: import_module(f"{package}.{name}")
        for name in sorted(m.name for m in pkgutil.iter_modules(folder))
    }
