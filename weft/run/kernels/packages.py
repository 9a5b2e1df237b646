"""Packages: load an optional one when it is first used, and refuse what it cannot do before it is called."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from typing import Any

from torch import Tensor

from weft.core.errors import InputError, MissingError
from weft.run.kernels.rules import Work
from weft.run.kernels.tiles import Tiles

Rule = Callable[[Work, str], str]


def load(backend: str, module: str, extra: str) -> Any:
    """Import a module of a package that an extra of weft installs."""
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingError(
            f"backend={backend!r} needs the package of {module}: {error}.",
            hint=f"Add it with: pip install 'weft[{extra}]'",
        ) from error


def check(rule: Rule, arch: str, q: Tensor, k: Tensor, tiles: Tiles, scale: float, *, backward: bool) -> None:
    """Raise if the package of a rule does not serve these operands."""
    backend = rule.__name__
    blocks = (tiles.block_q, tiles.block_k) if tiles.sparse else (0, 0)
    dtype = str(q.dtype).removeprefix("torch.")
    work = Work(tiles.sparse, backward, q.shape[3], dtype, *blocks, group=q.shape[1] // k.shape[1])
    if why := _refusal(rule, work, arch):
        raise InputError(
            f"backend={backend!r} cannot compute the {work} on {arch}: {why}",
            hint="backend='auto' takes one that can.",
        )
    if not scale > 0:
        # Both find the largest score before they scale it, and mask with -inf.
        raise InputError(
            f"scale must be > 0 for backend={backend!r}, got {scale}.", hint="backend='exact' takes any."
        )


@lru_cache(1024)
def _refusal(rule: Rule, work: Work, arch: str) -> str:
    return rule(work, arch)
