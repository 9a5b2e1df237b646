"""Coarse: attention among means of cubes, added through a learned gate, for what a selection leaves out.

The gate is a Linear of the attention module, `coarse`, on what the module was given; it begins at 0.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.models.adapter import matching
from weft.models.adapters import adapter_of
from weft.models.context import AttentionContext
from weft.models.scores import owned
from weft.run.switch import everyone
from weft.run.world import World


def add_gates(model: nn.Module, width: int) -> None:
    """Before the optimiser is made: they are weights of the model."""
    for pattern in adapter_of(model).attention:
        for _, module in matching(model, pattern):
            module.coarse = nn.Linear(width, width)
            nn.init.zeros_(module.coarse.weight)
            nn.init.zeros_(module.coarse.bias)


def gated(ctx: AttentionContext, layout: Layout, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """[B, H, S, D] to add to an attention; `layout` has the order in which blocks are cubes."""
    gate = getattr(ctx.module, "coarse", None)
    if gate is None or ctx.hidden is None or ctx.hidden.shape[1] != q.shape[2]:
        raise InputError(
            f"{ctx.name} has no gate for a coarse branch.", hint="Call DSV.prepare(model) first."
        )
    world, wide = ctx.world, k.repeat_interleave(q.shape[1] // k.shape[1], 1)
    wide_v = v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    means = _means(torch.cat((q, wide, wide_v), -1), layout, world, block)
    mean_q, mean_k, mean_v = means.split(q.shape[3], -1)
    held, back = np.unique(layout.order(world.comm.rank) // block, return_inverse=True)
    mine = mean_q.index_select(2, torch.from_numpy(held).to(q.device))
    out = F.scaled_dot_product_attention(mine, mean_k, mean_v, scale=ctx.scale)
    out = out.index_select(2, torch.from_numpy(back).to(q.device))
    out = F.pad(out, (0, 0, 0, q.shape[2] - out.shape[2]))
    return gate(ctx.hidden).unflatten(-1, (q.shape[1], -1)).transpose(1, 2) * out


def _means(x: Tensor, layout: Layout, world: World, block: int) -> Tensor:
    """[B, H, blocks, D] on every rank, of local tokens; gradients go back to whose the tokens are."""
    own, blocks = owned(layout)[world.comm.rank], -(-layout.size // block)
    at = torch.from_numpy(own.places // block).to(x.device)
    sums = x.new_zeros(*x.shape[:2], blocks, x.shape[3]).index_add(2, at, own.of(x))
    sizes = x.new_full((blocks, 1), block)
    sizes[-1] = layout.size - block * (blocks - 1)
    return everyone(sums, mesh=world, stage="coarse").sum(0) / sizes
