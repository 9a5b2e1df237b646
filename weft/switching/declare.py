"""Find the modules of a model that are declared to be stages, in the order in which they run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from weft.core.errors import InputError
from weft.hooks.module_tree import matching, modules
from weft.hooks.wrap import Args, Kwargs
from weft.plan.stage_layouts import ModelStage

DimGroups = tuple[tuple[str, ...], ...]
"""The dims of a tensor; several names in one group are one dim of it."""


@dataclass(frozen=True)
class Mixes:
    """The dims that a stage mixes, with options.

    dims     the dims of its input, if not those of all: "(batch time) space channel" has two in one.
    inside   it mixes a sharded dim by itself, as with `weft.attention`, if no other dim can be sharded.
    """

    mixes: str
    dims: str = ""
    inside: bool = False


Declared = Mapping[str, str | Mixes]


class StageCall(NamedTuple):
    """The arguments of a stage, and which of them is the tensor that passes through the stages."""

    args: Args
    kwargs: Kwargs
    at: int | str

    @staticmethod
    def of(name: str, args: Args, kwargs: Kwargs) -> StageCall:
        """Take the first argument that is a tensor."""
        for at, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, Tensor):
                return StageCall(args, kwargs, at)
        raise InputError(f"Stage {name} is given no tensor.")

    @property
    def x(self) -> Tensor:
        return self.kwargs[self.at] if isinstance(self.at, str) else self.args[self.at]

    def with_tensor(self, x: Tensor) -> StageCall:
        """Return the call with another tensor in its place."""
        if isinstance(self.at, str):
            return self._replace(kwargs={**self.kwargs, self.at: x})
        return self._replace(args=(*self.args[: self.at], x, *self.args[self.at + 1 :]))


class StageModule(NamedTuple):
    """A module that is a stage."""

    name: str
    module: nn.Module
    stage: ModelStage
    groups: DimGroups

    @property
    def order(self) -> list[str]:
        return [dim for group in self.groups for dim in group]

    def __str__(self) -> str:
        return " ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in self.groups)


def find_stages(model: nn.Module, loop: Declared, dims: list[str]) -> list[StageModule]:
    """Return the stages of one loop: layer by layer, in each layer in the order of the dict."""
    stages: list[tuple[tuple[tuple[int, str], ...], int, StageModule]] = []
    for number, (pattern, declared) in enumerate(loop.items()):
        mixes = declared if isinstance(declared, Mixes) else Mixes(declared)
        for name, module in matching(model, pattern):
            layer = _layer(name, pattern)
            stages.append((layer, number, _stage(name, module, mixes, dims)))
    stages.sort(key=lambda item: item[:2])
    return [stage for _, _, stage in stages]


def _layer(name: str, pattern: str) -> tuple[tuple[int, str], ...]:
    """Return what the wildcards stand for; numbers compare as numbers."""
    both = zip(name.split("."), pattern.split("."), strict=True)
    free = [component for component, wildcard in both if set("*?[") & set(wildcard)]
    return tuple((int(each), "") if each.isdecimal() else (0, each) for each in free)


def _stage(name: str, module: nn.Module, declared: Mixes, dims: list[str]) -> StageModule:
    groups = parse_dims(declared.dims) if declared.dims else tuple((dim,) for dim in dims)
    mixes = declared.mixes.split()
    if unknown := [dim for dim in mixes if dim not in dims]:
        raise InputError(
            f"Stage {name} is declared to mix {unknown[0]!r}.", hint=f"The dims are {', '.join(dims)}."
        )
    stage = StageModule(name, module, ModelStage(name, tuple(mixes), declared.inside), groups)
    if sorted(stage.order) != sorted(dims):
        raise InputError(
            f"Stage {name} is declared to have the dims {stage}.",
            hint=f"It must have each of {', '.join(dims)} once.",
        )
    return stage


def parse_dims(dims: str) -> DimGroups:
    """Parse dims: "(batch time) space" is (("batch", "time"), ("space",))."""
    return tuple(tuple(word.strip("()").split()) for word in re.findall(r"\([^()]*\)|[^\s()]+", dims))


def check_apart(stages: list[StageModule]) -> None:
    """Require that no stage is declared twice or lies in another."""
    names = [stage.name for stage in stages]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"Stage {name} is declared twice.")
        if inner := [other for other in names if other.startswith(f"{name}.")]:
            raise InputError(f"Stage {inner[0]} is inside stage {name}.", hint="Declare only one of them.")


def modules_between(model: nn.Module, stages: list[StageModule]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the largest modules that are neither stages nor contain any: what runs between stages."""
    names = {stage.name for stage in stages}
    around = {".".join(name.split(".")[:depth]) for name in names for depth in range(name.count(".") + 1)}
    for name, module in modules(model).items():
        parent = name.rpartition(".")[0]
        if name and parent in around and name not in names | around:
            yield name, module
