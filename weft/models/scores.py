"""Scores: what ranks find out together about an attention whose tokens they share, with little sent.

Blocks of tokens are pooled for a choice of tiles, and sampled queries are held against all keys. Tokens
that several ranks have (short text) are counted once, by the first of them. What is found does not depend
on the number of ranks, but for roundings of float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.core.indices import EMPTY, Indices, IntArray
from weft.core.layout import Layout
from weft.core.mask import BlockMask, BoolArray
from weft.run.kernels.budget import Keep
from weft.run.kernels.proxies import Proxies
from weft.run.kernels.select import top_k
from weft.run.switch import everyone, gather, switch
from weft.run.world import World


class Own(NamedTuple):
    """The tokens that a rank answers for: their local rows, and their places in the whole sequence."""

    rows: IntArray
    places: IntArray

    def of(self, x: Tensor) -> Tensor:
        """[…, these tokens, D] of local tensors."""
        if len(self.rows) == x.shape[-2]:
            return x
        return x.index_select(-2, torch.from_numpy(self.rows).to(x.device))


@lru_cache(maxsize=64)
def owned(layout: Layout) -> tuple[Own, ...]:
    """By rank; every token has one."""
    found: list[Own] = []
    before: Indices = EMPTY
    for rank in range(layout.ranks):
        order = layout.order(rank)
        rows = np.flatnonzero(~np.isin(order, before.array))
        found.append(Own(rows, order[rows]))
        before = before | layout.held(rank)
    return tuple(found)


def block_means(x: Tensor, layout: Layout, world: World, block: int) -> Tensor:
    """[B, this rank's part of the heads, blocks, D] in float32, of local tokens [B, H, S, D] of all heads.

    A block that several ranks have tokens of is exact: they send sums, in float64.
    """
    slots = [np.unique(own.places // block, return_inverse=True) for own in owned(layout)]
    own = owned(layout)[world.comm.rank]
    mine = torch.from_numpy(slots[world.comm.rank][1]).to(x.device)
    batch, heads, _, width = x.shape
    most = max(len(blocks) for blocks, _ in slots)
    sums = x.new_zeros(1, batch, heads, most, width, dtype=torch.float64)
    for total, one in zip(sums[0], x, strict=True):  # one sample at a time: it is widened
        total.index_add_(1, mine, own.of(one).double())
    dims = {"rank": world.comm.size, "batch": batch, "head": heads, "block": most, "width": width}
    parts = switch(sums, "rank", "head", dims=dims, mesh=world, stage="masks")
    blocks = -(-layout.size // block)
    total = parts.new_zeros(batch, parts.shape[2], blocks, width)
    for part, (held, _) in zip(parts, slots, strict=True):
        total[:, :, torch.from_numpy(held).to(x.device)] += part[:, :, : len(held)]
    sizes = torch.full((blocks, 1), block, dtype=torch.float64, device=x.device)
    sizes[-1] = layout.size - block * (blocks - 1)
    return (total / sizes).float()


def of_my_heads(x: Tensor, layout: Layout, world: World) -> Tensor:
    """[B, this rank's part of the heads, all tokens, D] of the tokens [B, H, own, D] of each."""
    owns = owned(layout)
    batch, heads, _, width = x.shape
    most = max(len(own.rows) for own in owns)
    sent = x.new_zeros(1, batch, heads, most, width)
    sent[0, :, :, : x.shape[2]] = x
    dims = {"rank": world.comm.size, "batch": batch, "head": heads, "token": most, "width": width}
    parts = switch(sent, "rank", "head", dims=dims, mesh=world, stage="masks")
    whole = parts.new_empty(batch, parts.shape[2], layout.size, width)
    for part, own in zip(parts, owns, strict=True):
        whole[:, :, torch.from_numpy(own.places).to(x.device)] = part[:, :, : len(own.places)]
    return whole


def best_tiles(
    q: Tensor, k: Tensor, layout: Layout, world: World, *, share: float, block: int, keep: Keep
) -> BlockMask:
    """Of each row of blocks the `share` of tiles with the highest scores of block means.

    Each rank chooses for its part of the heads, and the choices are exchanged: all ranks have the same
    mask whatever their roundings are. A batch shares it, by the highest score of its samples.
    """
    heads = q.shape[1]
    if k.shape[1] != heads:
        k = k.repeat_interleave(heads // k.shape[1], dim=1)
    pooled_q, pooled_k = (block_means(x, layout, world, block) for x in (q, k))
    mine, blocks = pooled_q.shape[1:3]
    tiles = np.zeros((0, blocks, blocks), dtype=np.bool_)
    if mine:
        tiles = top_k(Proxies(pooled_q, pooled_k), share, keep=keep).active.cpu().numpy()
    found = of_all_heads(tiles, heads, world, q.device)
    return found.mask(q_len=layout.size, kv_len=layout.size, block_q=block)


class Chosen(NamedTuple):
    """Tiles [heads, rows, columns] of all heads, on the host and, packed, where they were chosen."""

    tiles: BoolArray
    packed: Tensor

    def mask(self, **sizes: int) -> BlockMask:
        mask = BlockMask.from_tiles(self.tiles, **sizes)
        if self.packed.device.type != "cpu":  # block lists are made there
            bits = torch.arange(7, -1, -1, dtype=torch.uint8, device=self.packed.device)
            spread = (self.packed[..., None] >> bits & 1).bool().flatten(2)
            mask.keep_on_device(spread[:, :, : self.tiles.shape[2]])
        return mask


def of_all_heads(tiles: BoolArray, heads: int, world: World, device: torch.device) -> Chosen:
    """The tiles that each rank has chosen for its part of the heads."""
    packed = np.packbits(tiles, axis=2)
    words = np.pad(packed, ((0, 0), (0, 0), (0, -packed.shape[2] % 8))).view(np.float64)
    # Bits travel as what nobody looks at: a switch moves bytes and has no integers.
    dims = {"head": heads, "row": tiles.shape[1], "word": words.shape[2]}
    every = gather(torch.from_numpy(words).to(device), "head", dims=dims, mesh=world, stage="masks")
    bits = every.cpu().numpy().view(np.uint8)
    unpacked = np.unpackbits(bits, axis=2, count=tiles.shape[2]).view(np.bool_)
    return Chosen(unpacked, every.view(torch.uint8))


def sample(first: int, count: int, wanted: int, seed: int) -> IntArray:
    """Some of `count` places from `first` on, spread evenly and elsewhere for each seed."""
    stride = max(1, round(count * 0.6180339887))  # what is left by it never lines up with rows of a frame
    return first + np.unique((seed * 7919 + np.arange(min(wanted, count)) * stride) % count)


@torch.no_grad()
def kept_mass(
    q: Tensor,
    k: Tensor,
    layout: Layout,
    world: World,
    *,
    masks: Sequence[BlockMask],
    places: IntArray,
    scale: float | None = None,
) -> npt.NDArray[np.float64]:
    """[masks, heads, places]: the share of each of these queries' softmax that a mask keeps; mean of a batch.

    The queries go to the keys: each rank has its part of their softmax, and only sums are sent.
    """
    rows = rows_at(q, layout, world, places)
    own = owned(layout)[world.comm.rank]
    batch, heads, count, width = rows.shape
    found = rows.new_zeros(2 + len(masks), batch, heads, count, dtype=torch.float64)
    found[0] = -torch.inf
    shared = heads // k.shape[1]
    for head in range(heads if len(own.places) else 0):
        scores = rows[:, head] @ own.of(k[:, head // shared]).to(rows.dtype).mT
        scores *= width**-0.5 if scale is None else scale
        found[0, :, head] = top = scores.amax(-1)
        weights = scores.sub_(top[..., None]).exp_()
        found[1, :, head] = weights.sum(-1, dtype=torch.float64)
        for mask, kept in zip(masks, found[2:], strict=True):
            tiles = mask.patterns[mask.pattern_of[head]][places // mask.block_q]
            seen = torch.from_numpy(tiles[:, own.places // mask.block_k]).to(q.device)
            kept[:, head] = (weights * seen).sum(-1, dtype=torch.float64)
    parts = everyone(found, mesh=world, stage="masks").cpu().numpy()
    part = np.exp(parts[:, 0] - parts[:, 0].max(axis=0))
    total, *kept = (parts[:, 1:] * part[:, None]).sum(axis=0)
    return (np.stack(kept) / total).mean(axis=1)


def rows_at(q: Tensor, layout: Layout, world: World, places: IntArray) -> Tensor:
    """[B, H, places, D] of local tokens [B, H, S, D], in float32 or better, on every rank."""
    of_rank = [np.flatnonzero(np.isin(places, own.places)) for own in owned(layout)]
    most = max(map(len, of_rank))
    own, mine = owned(layout)[world.comm.rank], of_rank[world.comm.rank]
    order = np.argsort(own.places, kind="stable")
    rows = own.rows[order[np.searchsorted(own.places[order], places[mine])]]
    dtype = torch.promote_types(q.dtype, torch.float32)
    sent = q.new_zeros(*q.shape[:2], most, q.shape[3], dtype=dtype)
    sent[:, :, : len(mine)] = q[:, :, torch.from_numpy(rows).to(q.device)].to(dtype)
    whole = q.new_empty(*q.shape[:2], len(places), q.shape[3], dtype=dtype)
    for part, wanted in zip(everyone(sent, mesh=world, stage="masks"), of_rank, strict=True):
        whole[:, :, torch.from_numpy(wanted).to(q.device)] = part[:, :, : len(wanted)]
    return whole
