"""Masks by name: from the place of an attention, and its queries and keys, to the tiles it computes.

A mask of one with a `tile`, such as (4, 4, 4), is over the tokens in the order of `ctx.grid.voxels(tile)`;
the layout that it is given is in that order too.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.core.voxels import Extent
from weft.masks.grid import TokenGrid
from weft.masks.spec import mask_from_spec
from weft.models.context import AttentionContext
from weft.models.scores import best_tiles, kept_mass, sample
from weft.run.kernels.budget import Keep

ROWS = 64  # queries that tell whether a head is spatial or temporal, as SVG's authors take


class Geometric:
    """A mask by its name in `weft.masks.spec`, the same for all layers and steps; made once for a grid."""

    def __init__(self, spec: str, *, block: int = 64, tile: Extent | None = None) -> None:
        self.spec, self.block, self.tile = spec, block, tile
        self._made: dict[tuple[int, TokenGrid], BlockMask] = {}

    changes = False

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask:  # noqa: ARG002 - the protocol's
        return self.of(ctx.heads, ctx.grid)

    def of(self, heads: int, grid: TokenGrid) -> BlockMask:
        key = heads, grid
        if key not in self._made:
            self._made[key] = mask_from_spec(self.spec, heads=heads, grid=grid, block=self.block)
        return self._made[key]


class Profiled:
    """SVG: of two masks, each head has the one that keeps more of the softmax of sampled queries.

    Its authors compare outputs; the mass that is lost bounds their error, and needs no values. A batch
    shares one mask, by the mean of its samples.
    """

    def __init__(self, spatial: Geometric, temporal: Geometric) -> None:
        self.spatial, self.temporal = spatial, temporal
        self._made: dict[tuple[TokenGrid, tuple[int, ...]], BlockMask] = {}

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask:
        kinds = [kind.of(ctx.heads, ctx.grid) for kind in (self.spatial, self.temporal)]
        places = sample(ctx.grid.prefix, ctx.grid.video, ROWS, ctx.layer + ctx.step)
        mass = kept_mass(q, k, ctx.layout, ctx.world, masks=kinds, places=places, scale=ctx.scale)
        chosen = tuple(np.argmax(mass.mean(axis=2), axis=0).tolist())
        key = ctx.grid, chosen
        if key not in self._made:  # heads change their kind seldom: most steps find what they had
            tiles = np.stack([kind.patterns[0] for kind in kinds])[list(chosen)]
            self._made[key] = ctx.grid.mask(tiles, self.spatial.block)
        return self._made[key]


class TopK:
    """The `share` of tiles with the highest scores of pooled queries and keys, of every row of each head.

    Blocks are cut from cubes of `tile` tokens. Those with text are always active, and so is the diagonal.
    """

    def __init__(self, share: float, *, block: int = 64, tile: Extent = (4, 4, 4)) -> None:
        if not 0 < share <= 1:
            raise InputError(f"topk:{share:g} is no share of the tiles.", hint="Give topk:0.2 or the like.")
        self.share, self.block, self.tile = share, block, tile

    @torch.no_grad()
    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask:
        text = ctx.grid.voxels(self.tile).text
        keep = Keep.of_tokens(text, block_q=self.block)
        return best_tiles(q, k, ctx.layout, ctx.world, share=self.share, block=self.block, keep=keep)
