"""Coarse branch: gated attention among means of cubes, added for the keys that a selection leaves out.

The gate is a Linear of the attention module, `coarse`, on the module's input; it starts at 0.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.diffusers.adapters import adapter_of
from weft.hooks.module_tree import matching
from weft.run.switch import all_gather
from weft.run.world import World
from weft.sparse.context import AttentionContext
from weft.sparse.pooling import owned_tokens


def add_gates(model: nn.Module, width: int) -> None:
    """Add the gates, which are weights of the model, before the optimizer is made."""
    for pattern in adapter_of(model).attention:
        for _, module in matching(model, pattern):
            module.coarse = nn.Linear(width, width)
            nn.init.zeros_(module.coarse.weight)
            nn.init.zeros_(module.coarse.bias)


def gated(ctx: AttentionContext, layout: Layout, block: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return [B, H, S, D] to add to an attention; in the order of `layout`, blocks are cubes."""
    gate = getattr(ctx.module, "coarse", None)
    if gate is None or ctx.hidden is None or ctx.hidden.shape[1] != q.shape[2]:
        raise InputError(
            f"{ctx.name} has no gate for a coarse branch.", hint="Call DSV.prepare(model) first."
        )
    world = ctx.world
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    means = _means(torch.cat((q, k, v), -1), layout, world, block)
    mean_q, mean_k, mean_v = means.split(q.shape[3], -1)
    local_blocks, index = np.unique(layout.order(world.comm.rank) // block, return_inverse=True)
    local_q = mean_q.index_select(2, torch.from_numpy(local_blocks).to(q.device))
    out = F.scaled_dot_product_attention(local_q, mean_k, mean_v, scale=ctx.scale)
    out = out.index_select(2, torch.from_numpy(index).to(q.device))
    out = F.pad(out, (0, 0, 0, q.shape[2] - out.shape[2]))
    return gate(ctx.hidden).unflatten(-1, (q.shape[1], -1)).transpose(1, 2) * out


def _means(x: Tensor, layout: Layout, world: World, block: int) -> Tensor:
    """Return means [B, H, blocks, D] of local tokens on every rank; gradients return to the tokens' ranks."""
    own, blocks = owned_tokens(layout)[world.comm.rank], -(-layout.size // block)
    index = torch.from_numpy(own.places // block).to(x.device)
    sums = x.new_zeros(*x.shape[:2], blocks, x.shape[3]).index_add(2, index, own.of(x))
    sizes = x.new_full((blocks, 1), block)
    sizes[-1] = layout.size - block * (blocks - 1)
    return all_gather(sums, mesh=world, stage="coarse").sum(0) / sizes
