"""Voxels: an order of the tokens of a (t, h, w) grid in which a block of tokens is a compact cube.

In raster order 64 consecutive tokens are a line of pixels; as a 4 × 4 × 4 cube they attend to nearly the same
keys, and share one list of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from weft.core.errors import InputError
from weft.core.indices import IntArray

Extent = tuple[int, int, int]


@dataclass(frozen=True)
class Voxels:
    """The grid, its cubes and the text tokens before and after it, which keep their places.

    Blocks are consecutive runs of `block` tokens of the whole sequence, as in a `BlockMask`: nothing is
    padded. Whole cubes come first, in raster order; the partial cubes of ragged edges come after
    them, those cut by the same faces together. So, if `prefix` is a multiple of `block`, every whole
    cube is one block and only what is left over is packed into mixed ones. Positions (RoPE) belong to
    the token, not to its place: apply them before the grouping or group them too.

    >>> Voxels((1, 2, 5), (1, 2, 2)).order.tolist()
    [0, 1, 5, 6, 2, 3, 7, 8, 4, 9]
    """

    grid: Extent
    cube: Extent
    prefix: int = 0
    suffix: int = 0

    def __post_init__(self) -> None:
        for name, extent in (("grid", self.grid), ("cube", self.cube)):
            if len(extent) != 3 or min(extent) < 1:
                raise InputError(f"{name} must be three sizes (t, h, w) ≥ 1, got {extent}.")
        if self.prefix < 0 or self.suffix < 0:
            raise InputError(f"prefix and suffix must be ≥ 0, got {self.prefix} and {self.suffix}.")

    @property
    def block(self) -> int:
        """Tokens of a whole cube."""
        return prod(self.cube)

    @property
    def length(self) -> int:
        return self.prefix + prod(self.grid) + self.suffix

    @property
    def text(self) -> tuple[tuple[int, int], ...]:
        """The token ranges of text, before and after grouping."""
        ends = (0, self.prefix), (self.length - self.suffix, self.length)
        return tuple((start, stop) for start, stop in ends if stop > start)

    @cached_property
    def order(self) -> IntArray:
        """Place i of the grouped sequence holds token order[i] of the original one."""
        # The sort is stable: tokens of one cube keep their raster order.
        grid = self.prefix + np.argsort(self._cube_of, kind="stable")
        after = np.arange(self.length - self.suffix, self.length)
        return np.concatenate((np.arange(self.prefix), grid, after))

    @cached_property
    def inverse(self) -> IntArray:
        """Token i of the original sequence is at place inverse[i] of the grouped one."""
        places = np.empty_like(self.order)
        places[self.order] = np.arange(self.length)
        return places

    @cached_property
    def bounds(self) -> IntArray:
        """Cube c holds the places bounds[c] : bounds[c + 1] of the grouped sequence."""
        sizes = np.unique(self._cube_of, return_counts=True)[1]
        return self.prefix + np.concatenate(([0], np.cumsum(sizes)))

    @cached_property
    def _cube_of(self) -> IntArray:
        """The number of each grid token's cube, sorted by the faces that cut it, then in raster order."""
        cut: IntArray = np.zeros(self.grid, dtype=np.int64)
        cube: IntArray = np.zeros(self.grid, dtype=np.int64)
        for axis, (size, side) in enumerate(zip(self.grid, self.cube, strict=True)):
            along = np.arange(size) // side
            shape = [1, 1, 1]
            shape[axis] = size
            cube = cube * -(-size // side) + along.reshape(shape)
            cut = cut * 2 + ((along + 1) * side > size).reshape(shape)
        cubes = prod(-(-size // side) for size, side in zip(self.grid, self.cube, strict=True))
        return (cut * cubes + cube).ravel()
