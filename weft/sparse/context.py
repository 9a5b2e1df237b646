"""AttentionContext: the context of one attention call, and the protocol of sparse attention methods.

    class MyMethod:
        def mask(self, ctx, q, k):                # this rank's tokens, [B, H, S, D]
            return None                           # dense, or a BlockMask over all tokens

A mask must be the same on all ranks: computed from `ctx` alone, or from data that the ranks exchange. It
has H heads, or B × H: one for each sample. Optional members:

tokens(ctx)                 the Layout of the tokens in the order of the mask, if it differs
finish(ctx, q, k, v, out)   the final output, for example with a term added
loads(ctx)                  the share of computed keys of each head, if known before the mask and
                            equal on all groups of ranks: plans are built from it, reproducibly
changes                     False if the masks of a layer are constant: plans then fit the mask itself
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
