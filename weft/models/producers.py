"""Producers: from the place of an attention in the run, and its queries and keys, to the tiles it computes.

    class Mine:
        def mask_for(self, where, q, k):          # this rank's local tokens, [B, H, S, D]
            return None                           # dense, or a BlockMask over all tokens

A mask must be the same on all ranks: made from `where` alone, or from what the ranks have exchanged.
A producer with a `tile`, such as (4, 4, 4), makes masks over the tokens in the order of
`where.grid.voxels(tile)`; the places of `where.layout` are then in that order too.

A method answers a whole attention instead, by `where.attention` or in another way:

    class Mine:
        def attend(self, where, q, k, v):         # this rank's part of the output, [B, H, S, D]
            return where.attention(q, k, v, plan=where.plan)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.voxels import Extent
from weft.masks.grid import TokenGrid
from weft.masks.spec import mask_from_spec
from weft.models.prove import Proof
from weft.models.scores import best_tiles, kept_mass, sample
from weft.run.attention import attention
from weft.run.kernels.budget import Keep
from weft.run.world import World

ROWS = 64  # queries that tell whether a head is spatial or temporal, as SVG's authors take


@dataclass(frozen=True)
class Where:
    """One attention call: its place in the model and the run, and what its tokens are.

    layer, layers   of the layers whose attention is sharded.
    step, steps     of the run; `steps` is None where nobody knows.
    grid            of all tokens, the text before or after the video.
    layout          which of them each rank has.
    branch          which call of the step this is, where guidance takes several.
    scale           of the scores, if it is not 1/√head_dim.
    plan, backend   how the user wants attention to be split, and which kernel is to compute it.
    run             which forward of the model; blocks that are computed again have the number of theirs.
    module, hidden  the attention module, and its first tensor argument: this rank's tokens.
    name, proof     of the module; who checks its attention, if somebody does.
    """

    layer: int
    layers: int
    step: int
    steps: int | None
    grid: TokenGrid
    heads: int
    layout: Layout
    world: World
    branch: int = 0
    scale: float | None = None
    plan: Any = "auto"
    backend: str = "auto"
    run: int = 0
    module: nn.Module | None = field(default=None, compare=False, repr=False)
    hidden: Tensor | None = field(default=None, compare=False, repr=False)
    name: str = ""
    proof: Proof | None = field(default=None, compare=False, repr=False)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        plan: Any,
        mask: BlockMask | None = None,
        tokens: Layout | None = None,
    ) -> Tensor:
        """`weft.attention` here; a mask may be over the tokens in another order than `layout`'s: `tokens`."""
        layout = tokens or self.layout
        how = {"mesh": self.world, "scale": self.scale, "backend": self.backend}
        out = attention(q, k, v, mask=mask, plan=plan, tokens=layout, kv_tokens=layout, **how)
        if self.proof is not None:
            self.proof.check(self.name, (q, k, v), out, self.scale, mask, layout, self.world)
        return out


class Producer(Protocol):
    """Whoever can say which tiles an attention computes."""

    def mask_for(self, where: Where, q: Tensor, k: Tensor) -> BlockMask | None:
        """The mask of a call, None for a dense one. All ranks ask at the same time."""
        ...


class Method(Protocol):
    """Whoever answers attentions."""

    def attend(self, where: Where, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """What this rank's queries get of everybody's keys and values. All ranks ask at the same time."""
        ...


class Geometric:
    """A mask by its name in `weft.masks.spec`, the same for all layers and steps; made once for a grid."""

    def __init__(self, spec: str, *, block: int = 64, tile: Extent | None = None) -> None:
        self.spec, self.block, self.tile = spec, block, tile
        self._made: dict[tuple[int, TokenGrid], BlockMask] = {}

    def mask_for(self, where: Where, q: Tensor, k: Tensor) -> BlockMask:  # noqa: ARG002 - a Producer's
        return self.of(where.heads, where.grid)

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

    def mask_for(self, where: Where, q: Tensor, k: Tensor) -> BlockMask:
        kinds = [kind.of(where.heads, where.grid) for kind in (self.spatial, self.temporal)]
        places = sample(where.grid.prefix, where.grid.video, ROWS, where.layer + where.step)
        mass = kept_mass(q, k, where.layout, where.world, masks=kinds, places=places, scale=where.scale)
        chosen = tuple(np.argmax(mass.mean(axis=2), axis=0).tolist())
        key = where.grid, chosen
        if key not in self._made:  # heads change their kind seldom: most steps find what they had
            tiles = np.stack([kind.patterns[0] for kind in kinds])[list(chosen)]
            self._made[key] = where.grid.mask(tiles, self.spatial.block)
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
    def mask_for(self, where: Where, q: Tensor, k: Tensor) -> BlockMask:
        text = where.grid.voxels(self.tile).text
        keep = Keep.of_tokens(text, block_q=self.block)
        return best_tiles(q, k, where.layout, where.world, share=self.share, block=self.block, keep=keep)
