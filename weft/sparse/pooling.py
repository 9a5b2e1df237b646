"""Statistics of an attention whose tokens are sharded, computed by all ranks with little communication.

Blocks of tokens are pooled to choose tiles, and sampled queries are compared with all keys. Tokens that
several ranks have (short text) are counted once, by the first of them. Apart from roundings of float64, the
statistics do not depend on the number of ranks.
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
from weft.run.kernels.keep import Keep
from weft.run.kernels.proxies import Proxies
from weft.run.kernels.select import top_k
from weft.run.switch import all_gather, gather, switch
from weft.run.world import World


class OwnedTokens(NamedTuple):
    """The tokens that a rank counts: their local rows, and their places in the whole sequence."""

    rows: IntArray
    places: IntArray

    def of(self, x: Tensor) -> Tensor:
        """Return [..., these tokens, D] of a local tensor."""
        if len(self.rows) == x.shape[-2]:
            return x
        return x.index_select(-2, torch.from_numpy(self.rows).to(x.device))


@lru_cache(maxsize=64)
def owned_tokens(layout: Layout) -> tuple[OwnedTokens, ...]:
    """Return the tokens of each rank; every token belongs to one."""
    by_rank: list[OwnedTokens] = []
    before: Indices = EMPTY
    for rank in range(layout.ranks):
        order = layout.order(rank)
        rows = np.flatnonzero(~np.isin(order, before.array))
        by_rank.append(OwnedTokens(rows, order[rows]))
        before = before | layout.held(rank)
    return tuple(by_rank)


def block_means(x: Tensor, layout: Layout, world: World, block: int) -> Tensor:
    """Return means of blocks, [B, this rank's heads, blocks, D] in float32, of local tokens [B, H, S, D].

    Means of a block whose tokens several ranks have are exact: they send sums, in float64.
    """
    slots = [np.unique(own.places // block, return_inverse=True) for own in owned_tokens(layout)]
    own = owned_tokens(layout)[world.comm.rank]
    blocks_of_rows = torch.from_numpy(slots[world.comm.rank][1]).to(x.device)
    batch, heads, _, width = x.shape
    most = max(len(blocks) for blocks, _ in slots)
    sums = x.new_zeros(1, batch, heads, most, width, dtype=torch.float64)
    for total, one in zip(sums[0], x, strict=True):  # one sample at a time, since it is cast to float64
        total.index_add_(1, blocks_of_rows, own.of(one).double())
    dims = {"rank": world.comm.size, "batch": batch, "head": heads, "block": most, "width": width}
    parts = switch(sums, "rank", "head", dims=dims, mesh=world, stage="masks")
    blocks = -(-layout.size // block)
    total = parts.new_zeros(batch, parts.shape[2], blocks, width)
    for received, (held, _) in zip(parts, slots, strict=True):
        total[:, :, torch.from_numpy(held).to(x.device)] += received[:, :, : len(held)]
    sizes = torch.full((blocks, 1), block, dtype=torch.float64, device=x.device)
    sizes[-1] = layout.size - block * (blocks - 1)
    return (total / sizes).float()


def switch_to_heads(x: Tensor, layout: Layout, world: World) -> Tensor:
    """Return [B, this rank's heads, all tokens, D] of the tokens [B, H, own, D] of each rank."""
    owns = owned_tokens(layout)
    batch, heads, _, width = x.shape
    most = max(len(own.rows) for own in owns)
    sent = x.new_zeros(1, batch, heads, most, width)
    sent[0, :, :, : x.shape[2]] = x
    dims = {"rank": world.comm.size, "batch": batch, "head": heads, "token": most, "width": width}
    parts = switch(sent, "rank", "head", dims=dims, mesh=world, stage="masks")
    whole = parts.new_empty(batch, parts.shape[2], layout.size, width)
    for received, own in zip(parts, owns, strict=True):
        whole[:, :, torch.from_numpy(own.places).to(x.device)] = received[:, :, : len(own.places)]
    return whole


def top_k_tiles(
    q: Tensor, k: Tensor, layout: Layout, world: World, *, share: float, block: int, keep: Keep
) -> BlockMask:
    """Return the `share` of tiles of each row of blocks with the highest scores of block means.

    Each rank selects for some of the heads, and the selections are exchanged: all ranks have the same mask,
    however they round. A batch shares one mask, by the highest score over its samples.
    """
    heads = q.shape[1]
    if k.shape[1] != heads:
        k = k.repeat_interleave(heads // k.shape[1], dim=1)
    pooled_q, pooled_k = (block_means(x, layout, world, block) for x in (q, k))
    own_heads, blocks = pooled_q.shape[1:3]
    tiles = np.zeros((0, blocks, blocks), dtype=np.bool_)
    if own_heads:
        tiles = top_k(Proxies(pooled_q, pooled_k), share, keep=keep).cpu().numpy()
    every = gather_tiles(tiles, heads, world, q.device)
    return every.mask(q_len=layout.size, kv_len=layout.size, block_q=block)


class GatheredTiles(NamedTuple):
    """Tiles [heads, rows, columns] of all heads, on the host and, packed, on the device."""

    tiles: BoolArray
    packed: Tensor

    def mask(self, **sizes: int) -> BlockMask:
        mask = BlockMask.from_tiles(self.tiles, **sizes)
        if self.packed.device.type != "cpu":  # block lists are made there
            bits = torch.arange(7, -1, -1, dtype=torch.uint8, device=self.packed.device)
            spread = (self.packed[..., None] >> bits & 1).bool().flatten(2)
            mask.keep_on_device(spread[:, :, : self.tiles.shape[2]])
        return mask


def gather_tiles(tiles: BoolArray, heads: int, world: World, device: torch.device) -> GatheredTiles:
    """Gather the tiles that each rank has chosen for its heads."""
    packed = np.packbits(tiles, axis=2)
    words = np.pad(packed, ((0, 0), (0, 0), (0, -packed.shape[2] % 8))).view(np.float64)
    # Viewed as float64, whose bytes a gather copies unchanged: it does not support integers.
    dims = {"head": heads, "row": tiles.shape[1], "word": words.shape[2]}
    every = gather(torch.from_numpy(words).to(device), "head", dims=dims, mesh=world, stage="masks")
    bits = every.cpu().numpy().view(np.uint8)
    unpacked = np.unpackbits(bits, axis=2, count=tiles.shape[2]).view(np.bool_)
    return GatheredTiles(unpacked, every.view(torch.uint8))


def sample_positions(first: int, count: int, wanted: int, seed: int) -> IntArray:
    """Return some of `count` positions from `first` on, spread evenly, different for each seed."""
    stride = max(1, round(count * 0.6180339887))  # the golden ratio never lines up with rows of a frame
    return first + np.unique((seed * 7919 + np.arange(min(wanted, count)) * stride) % count)


@torch.no_grad()
def recall(
    q: Tensor,
    k: Tensor,
    layout: Layout,
    world: World,
    *,
    masks: Sequence[BlockMask],
    places: IntArray,
    scale: float | None = None,
) -> npt.NDArray[np.float64]:
    """Return [masks, heads, places]: the share of these queries' softmax inside of a mask; mean of a batch.

    Queries are gathered, keys are not: each rank computes the softmax over its keys, and sends only sums.
    """
    rows = gather_rows(q, layout, world, places)
    own = owned_tokens(layout)[world.comm.rank]
    batch, heads, count, width = rows.shape
    sums = rows.new_zeros(2 + len(masks), batch, heads, count, dtype=torch.float64)
    sums[0] = -torch.inf
    shared = heads // k.shape[1]
    for head in range(heads if len(own.places) else 0):
        scores = rows[:, head] @ own.of(k[:, head // shared]).to(rows.dtype).mT
        scores *= width**-0.5 if scale is None else scale
        sums[0, :, head] = top = scores.amax(-1)
        weights = scores.sub_(top[..., None]).exp_()
        sums[1, :, head] = weights.sum(-1, dtype=torch.float64)
        for mask, inside in zip(masks, sums[2:], strict=True):
            tiles = mask.patterns[mask.pattern_of[head]][places // mask.block_q]
            is_active = torch.from_numpy(tiles[:, own.places // mask.block_k]).to(q.device)
            inside[:, head] = (weights * is_active).sum(-1, dtype=torch.float64)
    parts = all_gather(sums, mesh=world, stage="masks").cpu().numpy()
    weight = np.exp(parts[:, 0] - parts[:, 0].max(axis=0))
    total, *inside = (parts[:, 1:] * weight[:, None]).sum(axis=0)
    return (np.stack(inside) / total).mean(axis=1)


def gather_rows(q: Tensor, layout: Layout, world: World, places: IntArray) -> Tensor:
    """Gather the rows [B, H, places, D] of local tokens [B, H, S, D] to every rank, in float32 or better."""
    of_rank = [np.flatnonzero(np.isin(places, own.places)) for own in owned_tokens(layout)]
    most = max(map(len, of_rank))
    own, mine = owned_tokens(layout)[world.comm.rank], of_rank[world.comm.rank]
    order = np.argsort(own.places, kind="stable")
    rows = own.rows[order[np.searchsorted(own.places[order], places[mine])]]
    dtype = torch.promote_types(q.dtype, torch.float32)
    sent = q.new_zeros(*q.shape[:2], most, q.shape[3], dtype=dtype)
    sent[:, :, : len(mine)] = q[:, :, torch.from_numpy(rows).to(q.device)].to(dtype)
    whole = q.new_empty(*q.shape[:2], len(places), q.shape[3], dtype=dtype)
    for received, at in zip(all_gather(sent, mesh=world, stage="masks"), of_rank, strict=True):
        whole[:, :, torch.from_numpy(at).to(q.device)] = received[:, :, : len(at)]
    return whole
