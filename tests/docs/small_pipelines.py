"""Small defaults for the pipelines of Diffusers whose calls pages print: tiny checkpoints, on a CPU."""

from __future__ import annotations

import inspect
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

SMALL = {
    "height": 48, "width": 80, "num_frames": 9, "num_inference_steps": 2, "max_sequence_length": 17,
}  # fmt: skip
PIPELINES = {"diffusers.pipelines.wan.pipeline_wan": "WanPipeline"}


def small_defaults(call: Any) -> tuple[Any, ...]:
    parameters = inspect.signature(call).parameters.values()
    return tuple(SMALL.get(one.name, one.default) for one in parameters if one.default is not one.empty)


class SmallPipelines(MetaPathFinder):
    """Import a pipeline as PathFinder does, and change its defaults."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in PIPELINES else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                load(module)
                call = inspect.unwrap(getattr(module, PIPELINES[name]).__call__)
                call.__defaults__ = small_defaults(call)

            spec.loader.exec_module = exec_module
        return spec


def install() -> None:
    sys.meta_path.insert(0, SmallPipelines())
