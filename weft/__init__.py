"""weft: one long sequence, woven over many devices.

The names below load on first use, so that `import weft` costs nothing and needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.core.errors import WeftError
    from weft.core.layout import Layout
    from weft.core.mask import BlockMask
    from weft.core.mesh import Mesh
    from weft.core.problem import Problem
    from weft.core.schedule import Schedule
    from weft.core.topology import Topology
    from weft.models.adapter import Adapter, Cut
    from weft.models.explain import explain
    from weft.models.parallelize import parallelize, restore
    from weft.models.stages import stages
    from weft.run.attention import attention
    from weft.run.devices import device
    from weft.run.switch import gather, keep, split, switch
    from weft.run.trace import trace

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "BlockMask",
    "Cut",
    "Layout",
    "Mesh",
    "Problem",
    "Schedule",
    "Topology",
    "WeftError",
    "attention",
    "device",
    "explain",
    "gather",
    "keep",
    "parallelize",
    "restore",
    "split",
    "stages",
    "switch",
    "trace",
]

_HOMES = {
    "Adapter": "weft.models.adapter",
    "explain": "weft.models.explain",
    "Cut": "weft.models.adapter",
    "BlockMask": "weft.core.mask",
    "Layout": "weft.core.layout",
    "Mesh": "weft.core.mesh",
    "Problem": "weft.core.problem",
    "Schedule": "weft.core.schedule",
    "Topology": "weft.core.topology",
    "WeftError": "weft.core.errors",
    "attention": "weft.run.attention",
    "device": "weft.run.devices",
    "gather": "weft.run.switch",
    "keep": "weft.run.switch",
    "parallelize": "weft.models.parallelize",
    "restore": "weft.models.parallelize",
    "split": "weft.run.switch",
    "stages": "weft.models.stages",
    "switch": "weft.run.switch",
    "trace": "weft.run.trace",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    try:
        found = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from weft.core.errors import MissingError

        raise MissingError(
            f"weft.{name} needs torch, which is not installed.", hint="Add it with: pip install 'weft[torch]'"
        ) from error
    globals()[name] = found  # asked once: the next access does not come through here
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
