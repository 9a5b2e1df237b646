"""Sparse attention by name, `topk:0.2,dense_steps=10`, with the published settings as defaults.

A spec is a mask's name and options as in `weft.masks.spec`, or topk:SHARE, and for all of them

dense_steps, dense_layers, dense_last   the first steps, the first and the last layers that stay dense; below
                                        1 a share of them
refresh                                 steps that a mask is reused for before it is made anew
recall                                  sampled queries by which some calls are measured; 0 for none
block                                   tokens of a block

The masks of a method with a `tile`, such as (4, 4, 4), are over the tokens in the order of
`ctx.grid.voxels(tile)`, and so is the layout that it gets.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError, nearest_of
from weft.core.mask import BlockMask
from weft.core.voxels import Extent
from weft.masks.grid import TokenGrid
from weft.masks.spec import PRODUCERS, mask_from_spec, options
from weft.run.kernels.keep import Keep
from weft.sparse.context import AttentionContext, SparseAttention
from weft.sparse.pooling import recall, sample_positions, top_k_tiles

SYNTHETIC = frozenset({"evolving", "paro", "sparge", "vsa"})  # workloads to plan for, without a model
DEFAULT_STEPS = 50  # assumed if unknown, as in the published settings
SVG_QUERIES = 64  # sampled to classify a head as spatial or temporal, as SVG's authors do


class StaticMask:
    """A mask by its name in `weft.masks.spec`, the same for all layers and steps; made once for a grid."""

    def __init__(self, spec: str, *, block: int = 64, tile: Extent | None = None) -> None:
        self.spec, self.block, self.tile = spec, block, tile
        self._masks: dict[tuple[int, TokenGrid], BlockMask] = {}

    changes = False

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask:  # noqa: ARG002 - the protocol's
        return self.of(ctx.heads, ctx.grid)

    def of(self, heads: int, grid: TokenGrid) -> BlockMask:
        key = heads, grid
        if key not in self._masks:
            self._masks[key] = mask_from_spec(self.spec, heads=heads, grid=grid, block=self.block)
        return self._masks[key]


class FixedMask:
    """One BlockMask, for all layers and steps."""

    changes = False

    def __init__(self, mask: BlockMask) -> None:
        self.only = mask

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask:  # noqa: ARG002 - the protocol's
        mask, grid = self.only, ctx.grid
        if (mask.heads, mask.q_len, mask.kv_len) != (ctx.heads, grid.tokens, grid.tokens):
            raise InputError(
                f"sparse={mask!r} does not fit {ctx.name or 'the attention'}, which has {ctx.heads} heads "
                f"and {grid.tokens} tokens: {grid!r}.",
                hint="Make it with weft.mask for this grid and these heads, or pass its name.",
            )
        return mask


class ProfiledMask:
    """SVG: of two masks, each head has the one with the higher recall of sampled queries.

    Its authors compare outputs; the mass that is lost bounds their error, and needs no values. A batch
    shares one mask, by the mean of its samples.
    """

    def __init__(self, spatial: StaticMask, temporal: StaticMask) -> None:
        self.spatial, self.temporal = spatial, temporal
        self._masks: dict[tuple[TokenGrid, tuple[int, ...]], BlockMask] = {}

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask:
        kinds = [kind.of(ctx.heads, ctx.grid) for kind in (self.spatial, self.temporal)]
        positions = sample_positions(ctx.grid.prefix, ctx.grid.video, SVG_QUERIES, ctx.layer + ctx.step)
        mass = recall(q, k, ctx.layout, ctx.world, masks=kinds, places=positions, scale=ctx.scale)
        choice = tuple(np.argmax(mass.mean(axis=2), axis=0).tolist())
        key = ctx.grid, choice
        if key not in self._masks:  # heads seldom change their kind: most steps reuse a mask
            tiles = np.stack([kind.patterns[0] for kind in kinds])[list(choice)]
            self._masks[key] = ctx.grid.mask(tiles, self.spatial.block)
        return self._masks[key]


class TopKMask:
    """The `share` of tiles with the highest scores of pooled queries and keys, of every row of each head.

    Blocks are cut from cubes of `tile` tokens. Those with text are always active, and so is the diagonal.
    """

    def __init__(self, share: float, *, block: int = 64, tile: Extent = (4, 4, 4)) -> None:
        if not 0 < share <= 1:
            raise InputError(
                f"The share of tiles of topk must be in (0, 1], got {share:g}.", hint="Write topk:0.2."
            )
        self.share, self.block, self.tile = share, block, tile

    @torch.no_grad()
    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask:
        text = ctx.grid.voxels(self.tile).text
        keep = Keep.of_tokens(text, block_q=self.block)
        return top_k_tiles(q, k, ctx.layout, ctx.world, share=self.share, block=self.block, keep=keep)


@dataclass(frozen=True)
class MaskSchedule:
    """Which attentions are sparse, and when their masks are made; numbers below 1 are shares."""

    dense_steps: float = 0.0
    dense_layers: float = 0.0
    dense_last: float = 0.0
    refresh: int = 1
    recall: int = 32
    block: int = 64

    def __post_init__(self) -> None:
        for field in fields(self):
            number = getattr(self, field.name)
            least = int(field.name in ("refresh", "block"))
            if not number >= least or (number >= 1 and number != int(number)):
                raise InputError(
                    f"{field.name} must be >= {least}, and an integer if >= 1, got {number:g}.",
                    hint=f"Write it like {field.name}=5.",
                )

    def is_dense(self, ctx: AttentionContext) -> bool:
        return (
            ctx.step < _count(self.dense_steps, ctx.steps or DEFAULT_STEPS)
            or ctx.layer < _count(self.dense_layers, ctx.layers)
            or ctx.layer >= ctx.layers - _count(self.dense_last, ctx.layers)
        )


def _count(number: float, total: int) -> int:
    return round(number * total) if number < 1 else int(number)


# The authors' settings for Wan and HunyuanVideo in 50 steps. topk uses those of AdaSpa, whose authors also
# report that the patterns of tiles hardly change from step to step.
PUBLISHED = {
    "sta": MaskSchedule(dense_steps=0.3),
    "svg": MaskSchedule(dense_steps=0.3, dense_layers=0.03),
    "radial": MaskSchedule(dense_steps=0.24, dense_layers=1),
    "topk": MaskSchedule(dense_steps=0.2, refresh=5),
}


def parse_method(spec: str) -> tuple[SparseAttention, MaskSchedule]:
    """Return the method that a spec names, and when it is used."""
    name, _, rest = spec.partition(":")
    schedule, own, changes = PUBLISHED.get(name, MaskSchedule()), dict[str, str](), dict[str, float]()
    for option in rest.split(",") if rest else ():
        key, equals, text = (word.strip() for word in option.partition("="))
        if equals and hasattr(schedule, key):
            changes[key] = _number(key, text, whole=isinstance(getattr(schedule, key), int))
        else:
            own[key] = option
    schedule = replace(schedule, **changes)
    return _method(name, own, schedule.block), schedule


def _number(key: str, text: str, *, whole: bool) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        raise InputError(f"{key}={text} is not a number.", hint=f"Write it like {key}=5.") from None


def _method(name: str, own: dict[str, str], block: int) -> SparseAttention:
    tile = own.get("tile", "").partition("=")[2]
    if name == "topk":
        return _topk(own, tile, block)
    if name not in PRODUCERS:
        raise InputError(
            f"There is no sparse attention {name!r}.", hint=nearest_of(name, ("topk", *PRODUCERS))
        )
    if name in SYNTHETIC:
        raise InputError(
            f"{name!r} selects blocks by synthetic scores, not by those of a model.",
            hint="It is for weft plan and weft mask. Use topk:0.2 to select by the model's queries and keys.",
        )
    spec = f"{name}:{','.join(own.values())}" if own else name
    if name in PUBLISHED:  # raise errors now; other masks may need a certain number of heads
        mask_from_spec(spec, heads=1, grid=TokenGrid(1, 1, 1), block=block)
    if name == "svg" and "spatial" not in own:
        kinds = (",".join([*own.values(), f"spatial={flag}"]) for flag in (1, 0))
        return ProfiledMask(*(StaticMask(f"svg:{kind}", block=block) for kind in kinds))
    return StaticMask(spec, block=block, tile=_extent(tile) if tile else options(name).get("tile"))


def _topk(own: dict[str, str], tile: str, block: int) -> TopKMask:
    try:
        [share] = (float(option) for key, option in own.items() if key != "tile")
        extent = _extent(tile or "4x4x4")
    except ValueError:
        pass
    else:
        return TopKMask(share, block=block, tile=extent)
    raise InputError(
        f"topk:{','.join(own.values())} cannot be parsed.",
        hint="Write it like topk:0.2 or topk:0.2,tile=4x4x4; options are "
        + ", ".join(f.name for f in fields(MaskSchedule))
        + ".",
    )


def _extent(text: str) -> Extent:
    t, h, w = map(int, text.split("x"))
    return t, h, w
