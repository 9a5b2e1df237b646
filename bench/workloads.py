"""Masks of benchmarks by name: those of `weft.masks.spec`, and the synthetic ones of this folder."""

from __future__ import annotations

import json
from collections.abc import Callable

from bench.pooled import sparge_mask, vsa_mask
from bench.synthetic import evolving_mask, paro_mask
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid
from weft.masks.spec import mask_from_spec

SYNTHETIC: dict[str, Callable[..., BlockMask]] = {
    "evolving": evolving_mask,
    "paro": paro_mask,
    "sparge": sparge_mask,
    "vsa": vsa_mask,
}


def workload_mask(spec: str, *, heads: int, grid: TokenGrid, block: int = 64, seed: int = 0) -> BlockMask:
    """Return the mask of a spec such as `sta:dense=0.2` or `evolving:density=0.47`.

    >>> workload_mask("paro:density=0.4,cv=0", heads=2, grid=TokenGrid(2, 8, 8)).grid
    (2, 128, 128, 64, 64)
    """
    name, _, rest = spec.partition(":")
    if name not in SYNTHETIC:
        return mask_from_spec(spec, heads=heads, grid=grid, block=block, seed=seed)
    pairs = (option.split("=") for option in rest.split(",") if option)
    options = {key: json.loads(number) for key, number in pairs}
    return SYNTHETIC[name](heads, grid, block=block, seed=seed, **options)
