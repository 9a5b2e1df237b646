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
    from weft.diffusers.adapter import Adapter, Shard
    from weft.diffusers.explain import explain
    from weft.diffusers.parallelize import parallelize, restore
    from weft.run.attention import attention
    from weft.run.devices import device
    from weft.run.measure.trace import trace
    from weft.run.switch import assert_sharded, gather, split, switch
    from weft.switching.stages import stages

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "BlockMask",
    "Layout",
    "Mesh",
    "Problem",
    "Schedule",
    "Shard",
    "Topology",
    "WeftError",
    "assert_sharded",
    "attention",
    "device",
    "explain",
    "gather",
    "parallelize",
    "restore",
    "split",
    "stages",
    "switch",
    "trace",
]

_HOMES = {
    "Adapter": "weft.diffusers.adapter",
    "explain": "weft.diffusers.explain",
    "BlockMask": "weft.core.mask",
    "Layout": "weft.core.layout",
    "Mesh": "weft.core.mesh",
    "Problem": "weft.core.problem",
    "Schedule": "weft.core.schedule",
    "Shard": "weft.diffusers.adapter",
    "Topology": "weft.core.topology",
    "WeftError": "weft.core.errors",
    "assert_sharded": "weft.run.switch",
    "attention": "weft.run.attention",
    "device": "weft.run.devices",
    "gather": "weft.run.switch",
    "parallelize": "weft.diffusers.parallelize",
    "restore": "weft.diffusers.parallelize",
    "split": "weft.run.switch",
    "stages": "weft.switching.stages",
    "switch": "weft.run.switch",
    "trace": "weft.run.measure.trace",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'weft' has no attribute {name!r}")
    try:
        attribute = getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from weft.core.errors import MissingError
        from weft.core.install import install_command

        raise MissingError(
            f"weft.{name} needs torch, which is not installed.",
            hint=f"Add it with: {install_command('torch')}",
        ) from error
    globals()[name] = attribute  # asked once: the next access does not come through here
    return attribute


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
