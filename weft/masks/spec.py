"""Spec: masks by name, such as `sta:window=3x3x3,dense=0.1`, for commands, files and experiments.

The options of a mask are the keyword arguments of its producer, read by the types of their defaults:
numbers, boxes such as 3x3x3, and several of either joined with +. New files in weft/masks are discovered.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import numpy as np

from weft.core.errors import InputError, nearest_of
from weft.core.mask import BlockMask
from weft.core.modules import modules
from weft.masks.grid import TokenGrid
from weft.masks.random import random_mask


def _dense(heads: int, grid: TokenGrid, *, block: int) -> BlockMask:
    """All tiles."""
    return BlockMask.dense(heads, grid.tokens, block=block)


def _random(
    heads: int,
    grid: TokenGrid,
    *,
    block: int,
    density: Sequence[float] = (0.25,),
    cv: float = 0.0,
    seed: int = 0,
) -> BlockMask:
    """Random tiles; densities spread over heads with a cv, or are listed head by head."""
    mask = random_mask(heads, grid.tokens, grid.tokens, block=block, density=density, cv=cv, seed=seed)
    text = grid.text(block)
    return mask | grid.mask(np.stack([text[:, None] | text] * heads), block) if text.any() else mask


def producers() -> dict[str, Callable[..., BlockMask]]:
    """Return masks by name: dense, random, and `NAME_mask(heads, grid, …)` of each module `NAME` here."""
    producers: dict[str, Callable[..., BlockMask]] = {"dense": _dense, "random": _random}
    for name, module in modules("weft.masks").items():
        make = getattr(module, f"{name}_mask", None)
        if make:
            producers.setdefault(name, make)
    return producers


MAX_TILES = 2**31
"""Producers hold a byte of each tile before it is packed."""
PRODUCERS = producers()


def mask_from_spec(
    text: str, *, heads: int, grid: TokenGrid | Sequence[int], block: int = 64, seed: int = 0
) -> BlockMask:
    """Return the mask of `NAME` or `NAME:option=value,option=value`; a trace is `trace:FILE`.

    heads    of the attention: each may have a pattern of its own.
    grid     (t, h, w) tokens of a video, or a `TokenGrid` with text before or after it.
    block    tokens of a block: tiles of block × block are computed or left out.
    seed     of masks that are random.

    Names are dense, random and the files of weft/masks: sta, svg, radial, sparge, vsa, ….

    >>> mask_from_spec("sta:window=1x3x3,dense=0.5", heads=4, grid=(8, 16, 16))
    BlockMask(4 heads (2 patterns), 2048×2048 tokens, blocks 64×64, 64.1% active)
    """
    grid = TokenGrid.of(grid)
    if heads < 1:
        raise InputError(f"heads must be ≥ 1, got {heads}.")
    if seed < 0:
        raise InputError(f"seed must be ≥ 0, got {seed}.")
    name, _, rest = text.partition(":")
    if name not in PRODUCERS:
        raise InputError(f"There is no mask {name!r}.", hint=nearest_of(name, PRODUCERS))
    _check_tiles(1 if name == "dense" else heads, grid, block)
    known = options(name)
    kwargs: dict[str, Any] = {"block": block}
    for key, written in _pairs(name, rest):
        if key not in known:
            raise InputError(f"The mask {name!r} has no option {key!r}.", hint=nearest_of(key, known))
        try:
            kwargs[key] = _read(written, known[key])
        except ValueError:
            raise InputError(
                f"{key}={written} cannot be read.", hint=f"Write it like {key}={show(known[key])}."
            ) from None
    make = PRODUCERS[name]
    if "seed" in inspect.signature(make).parameters:
        kwargs["seed"] = seed
    return make(heads, grid, **kwargs)


def _check_tiles(patterns: int, grid: TokenGrid, block: int) -> None:
    blocks, fits = grid.blocks(block), block
    while patterns * grid.blocks(fits) ** 2 > MAX_TILES:
        fits *= 2
    if fits > block:
        raise InputError(
            f"{blocks:,} × {blocks:,} tiles of {patterns} heads do not fit into memory.",
            hint=f"Use blocks of {fits} tokens or more.",
        )


def options(name: str) -> dict[str, Any]:
    """Return the options of a mask in a spec, with their defaults."""
    parameters = inspect.signature(PRODUCERS[name]).parameters.values()
    named = {each.name: each.default for each in parameters if each.kind is each.KEYWORD_ONLY}
    return {key: value for key, value in named.items() if key not in ("block", "seed") and value is not None}


def show(value: Any) -> str:
    """Return a value as a spec writes it."""
    if isinstance(value, tuple):
        items = cast("tuple[Any, ...]", value)
        return _joint(items).join(map(show, items))
    return f"{value:g}" if isinstance(value, float) else str(value) or "FILE"


def _pairs(name: str, rest: str) -> Iterator[tuple[str, str]]:
    for number, option in enumerate(rest.split(",") if rest else ()):
        key, equals, written = (word.strip() for word in option.partition("="))
        if name == "trace" and number == 0 and key != "file":
            yield "file", option
        elif equals and written:
            yield key, written
        else:
            raise InputError(f"{option!r} is not an option of {name!r}.", hint=nearest_of(key, options(name)))


def _read(written: str, default: Any) -> Any:
    """Parse an option by the type of its default."""
    if isinstance(default, tuple):
        items = cast("tuple[Any, ...]", default)
        texts = written.split(_joint(items))
        if isinstance(items[0], int) and len(texts) != len(items):
            raise ValueError(written)
        return tuple(_read(text, items[0]) for text in texts)
    value = type(default)(written)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(written)
    return value


def _joint(items: tuple[Any, ...]) -> str:
    return "x" if isinstance(items[0], int) else "+"
