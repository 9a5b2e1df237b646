"""Masks of an attention call by name, made once for each grid."""

from __future__ import annotations

from functools import lru_cache

from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid
from weft.masks.spec import mask_from_spec

Grid = TokenGrid | tuple[int, int, int]


def named_mask(
    mask: BlockMask | str | None, grid: Grid | None, heads: int, prefix: int, suffix: int
) -> BlockMask:
    """Return the mask of a name on a grid, whose text is `prefix` and `suffix` if it is (t, h, w)."""
    if not isinstance(mask, str):
        raise InputError(
            f"grid={grid!r} is for a mask by name; mask is {mask!r}.",
            hint='Leave grid out, or pass a name, such as mask="sta".',
        )
    if grid is None:
        raise InputError(
            f"mask={mask!r} needs the grid of the video: the tensors have tokens, but not their frames, rows "
            "and columns.",
            hint=f"Pass grid=(t, h, w) too, or mask=weft.mask({mask!r}, grid=(t, h, w), heads={heads}).",
        )
    if isinstance(grid, TokenGrid) and (prefix, suffix) not in ((0, 0), (grid.prefix, grid.suffix)):
        raise InputError(
            f"prefix={prefix} and suffix={suffix} are not those of grid={grid!r}.",
            hint="Pass them once: with the grid, or as prefix= and suffix= beside grid=(t, h, w).",
        )
    return _made(mask, TokenGrid.of(grid, prefix=prefix, suffix=suffix), heads)


@lru_cache(64)
def _made(name: str, grid: TokenGrid, heads: int) -> BlockMask:
    return mask_from_spec(name, heads=heads, grid=grid)
