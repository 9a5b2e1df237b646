"""Sites: the modules of a model that were declared to be stages, in the order in which they run."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

from torch import Tensor, nn

from weft.core.errors import InputError
from weft.models.adapter import modules, named
from weft.plan.stages import Stage

Groups = tuple[tuple[str, ...], ...]
"""The dims of a tensor; several names in one group are one dim of it."""


@dataclass(frozen=True)
class Mixes:
    """The dims that a stage mixes, where more than them is to be said.

    dims     the dims of its input, if not those of all: "(batch time) space channel" has two in one.
    inside   it mixes a sharded dim by itself, as with `weft.attention`, if no other dim can be sharded.
    """

    mixes: str
    dims: str = ""
    inside: bool = False


Declared = Mapping[str, str | Mixes]


class Call(NamedTuple):
    """The arguments of a module, and which of them is the tensor that runs through the stages."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    at: int | str

    @staticmethod
    def find(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """With the first argument that is a tensor."""
        for at, value in (*enumerate(args), *kwargs.items()):
            if isinstance(value, Tensor):
                return Call(args, kwargs, at)
        return None

    @property
    def x(self) -> Tensor:
        return self.kwargs[self.at] if isinstance(self.at, str) else self.args[self.at]

    def given(self, x: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with another tensor in its place."""
        if isinstance(self.at, str):
            return self.args, {**self.kwargs, self.at: x}
        return (*self.args[: self.at], x, *self.args[self.at + 1 :]), self.kwargs


class Site(NamedTuple):
    """A module that is a stage."""

    name: str
    module: nn.Module
    stage: Stage
    groups: Groups

    @property
    def order(self) -> list[str]:
        return [dim for group in self.groups for dim in group]

    def __str__(self) -> str:
        return " ".join(g[0] if len(g) == 1 else f"({' '.join(g)})" for g in self.groups)


def find_sites(model: nn.Module, loop: Declared, dims: list[str], shard: tuple[str, ...]) -> list[Site]:
    """The stages of one loop: layer by layer, in each layer in the order of the dict."""
    found: list[tuple[tuple[tuple[int, str], ...], int, Site]] = []
    for number, (pattern, said) in enumerate(loop.items()):
        matches = list(_matches(model, pattern))
        if not matches:
            names = [name for name, _ in model.named_modules() if name]
            near = get_close_matches(pattern.replace("*", "0"), names, cutoff=0.3)
            raise InputError(
                f"The model has no module {pattern!r}.",
                hint=f"Did you mean {', '.join(near)}? In a pattern * is any one part of a name."
                if near
                else "In a pattern * is any one part of a name.",
            )
        mixes = said if isinstance(said, Mixes) else Mixes(said)
        for layer, name, module in matches:
            found.append((layer, number, _site(name, module, mixes, dims, shard)))
    found.sort(key=lambda item: item[:2])
    return [site for _, _, site in found]


def _matches(model: nn.Module, pattern: str) -> Iterator[tuple[tuple[tuple[int, str], ...], str, nn.Module]]:
    """(what the wildcards stand for, name, module); numbers compare as numbers."""
    for name, module in named(model, pattern):
        both = zip(name.split("."), pattern.split("."), strict=True)
        free = [part for part, wanted in both if set("*?[") & set(wanted)]
        yield tuple((int(p), "") if p.isdecimal() else (0, p) for p in free), name, module


def _site(name: str, module: nn.Module, said: Mixes, dims: list[str], shard: tuple[str, ...]) -> Site:
    groups = parse(said.dims) if said.dims else tuple((dim,) for dim in dims)
    if unknown := [dim for dim in said.mixes.split() if dim not in dims]:
        raise InputError(
            f"Stage {name} is declared to mix {unknown[0]!r}.", hint=f"The dims are {', '.join(dims)}."
        )
    site = Site(
        name, module, Stage(name, tuple(d for d in said.mixes.split() if d in shard), said.inside), groups
    )
    if sorted(site.order) != sorted(dims):
        raise InputError(
            f"Stage {name} is declared to have the dims {site}.",
            hint=f"It must have each of {', '.join(dims)} once.",
        )
    return site


def parse(dims: str) -> Groups:
    """Dims as they are written: "(batch time) space" is (("batch", "time"), ("space",))."""
    return tuple(tuple(word.strip("()").split()) for word in re.findall(r"\([^()]*\)|[^\s()]+", dims))


def check_apart(sites: list[Site]) -> None:
    """No stage is declared twice or lies in another."""
    names = [site.name for site in sites]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"Stage {name} is declared twice.")
        if inner := [other for other in names if other.startswith(f"{name}.")]:
            raise InputError(f"Stage {inner[0]} lies in stage {name}.", hint="Declare one of them.")


def beside(model: nn.Module, sites: list[Site]) -> Iterator[tuple[str, nn.Module]]:
    """The largest modules that are neither stages nor contain any: what runs between stages."""
    names = {site.name for site in sites}
    around = {".".join(name.split(".")[:depth]) for name in names for depth in range(name.count(".") + 1)}
    for name, module in modules(model).items():
        parent = name.rpartition(".")[0]
        if name and parent in around and name not in names | around:
            yield name, module
