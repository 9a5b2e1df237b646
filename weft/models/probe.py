"""Probe: does a module mix a dim? One row of it is run by itself and beside a random one."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from weft.models.sites import Groups


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


def mixed_dim(
    module: nn.Module, call: Call, dims: Sequence[str], groups: Groups, sizes: dict[str, int]
) -> str | None:
    """The first of some dims that the module mixes.

    A module that cannot be run on one or two rows, or whose output has not the dims of its input, is not
    found out; neither is one whose mixing still counts for nothing, as behind a gate that begins at 0.
    """
    for dim in dims:
        if call.x.numel() and _mixes(module, call, dim, groups, sizes):
            return dim
    return None


def _mixes(module: nn.Module, call: Call, dim: str, groups: Groups, sizes: dict[str, int]) -> bool:
    order = [name for group in groups for name in group]
    at = order.index(dim)
    row = call.x.detach().reshape([sizes[name] for name in order]).narrow(at, 0, 1)
    random = torch.randn(row.shape, generator=torch.Generator().manual_seed(0)).to(row)
    pair = torch.cat([row, random * row.abs().mean().clamp(min=1e-3)], at)
    found: list[Tensor] = []
    try:
        with _quiet(module):
            for x in (row, pair):
                now = {**sizes, dim: x.shape[at]}
                args, kwargs = call.given(x.reshape([prod(now[d] for d in group) for group in groups]))
                out = module(*args, **kwargs)
                y = out[0] if isinstance(out, tuple) else out
                # A module between stages may change the number of channels.
                found.append(y.reshape([*(now[name] for name in order[:-1]), -1]).narrow(at, 0, 1))
    except Exception as error:  # noqa: BLE001 - whatever a module of the user's may raise on other sizes
        warnings.warn(f"A {type(module).__name__} cannot be run on one row of {dim}: {error}", stacklevel=2)
        return False
    alone, beside = found
    limit = torch.finfo(alone.dtype).eps ** 0.5 * alone.abs().max()
    return bool((alone - beside).abs().max() > limit)


@contextmanager
def _quiet(module: nn.Module) -> Iterator[None]:
    """Without gradients and dropout."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode
