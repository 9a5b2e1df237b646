"""AttentionContext: the circumstances of one attention call; and the protocol of sparse attention.

    class MyMethod:
        def mask(self, ctx, q, k):                # this rank's tokens, [B, H, S, D]
            return None                           # dense, or a BlockMask over all tokens

A mask must be the same on all ranks: made from `ctx` alone, or from what the ranks have exchanged. It has H
heads, or B × H: one for each sample. Besides `mask` there may be

tokens(ctx)                 the Layout of the tokens in the order of the mask, if that is another one
finish(ctx, q, k, v, out)   the output, with what is added to it
loads(ctx)                  by head, the share of its keys that is computed, if that is known before the mask
                            and in all groups of ranks alike: plans are made of it, and repeat to the bit
changes                     False where the masks of a layer stay: then plans are made for the mask itself
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid
from weft.run.world import World


@dataclass(frozen=True)
class AttentionContext:
    """One attention call: its position in the model and the run, and the meaning of its tokens."""

    layer: int
    layers: int
    """Of those whose attention is sharded."""
    step: int
    steps: int | None
    """None if unknown."""
    grid: TokenGrid
    """Of all tokens, the text before or after the video."""
    heads: int
    layout: Layout
    """Which tokens each rank has."""
    world: World
    branch: int = 0
    """Which call of the step, where guidance takes several."""
    scale: float | None = None
    """Of the scores; None: 1/√head_dim."""
    backend: str = "auto"
    run: int = 0
    """The number of the model's forward; blocks that are recomputed have the number of theirs."""
    name: str = ""
    """Of the attention module."""
    module: nn.Module | None = field(default=None, compare=False, repr=False)
    hidden: Tensor | None = field(default=None, compare=False, repr=False)
    """The module's first tensor argument: this rank's tokens."""


class SparseAttention(Protocol):
    """Chooses the tiles that an attention computes. All ranks call `mask` at the same time."""

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask | None: ...
