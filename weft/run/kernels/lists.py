"""Padded lists of blocks, as block-sparse packages read them, made once for each Tiles and device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from weft.run.kernels.tiles import Blocks, Tiles


@dataclass(frozen=True, eq=False)
class PaddedLists:
    """Active blocks of every row of blocks, strictly ascending: a ragged last block is the last entry.

    FlashAttention-4 masks the ragged end of a list's last entry only, and checks no order.
    """

    counts: Tensor
    """int32 [batch, heads, rows]."""
    index: Tensor
    """int32 [batch, heads, rows, width]; entries past a row's count are 0, which is a valid block."""
    has_empty: bool
    """Whether a count may be 0; True if tiles were selected on a device."""


def padded_lists(
    tiles: Tiles, device: torch.device, *, batch: int = 1, inverted: bool = False
) -> PaddedLists:
    """Return the kv blocks of each q block, or if `inverted` the q blocks of each kv block."""
    key = "padded lists", device, batch, inverted
    return tiles.cached(key, lambda: _pad(tiles, device, batch, inverted=inverted))


def _pad(tiles: Tiles, device: torch.device, batch: int, *, inverted: bool) -> PaddedLists:
    blocks = tiles.lists(device)
    if inverted:
        blocks = blocks.inverted
    width, has_empty = blocks.kv_blocks, True
    if tiles.active is not None:
        # On the host the longest row is known: the list need not be as wide as all blocks.
        lengths = tiles.active.sum(1 if inverted else 2)
        width, has_empty = int(lengths.max(initial=1)), not bool(lengths.all())
    counts, index = _rows(blocks, width)
    counts, index = (x.expand(batch, *x.shape[1:]).contiguous() for x in (counts, index))
    return PaddedLists(counts, index, has_empty)


def _rows(blocks: Blocks, width: int) -> tuple[Tensor, Tensor]:
    counts = blocks.starts.diff()
    columns = torch.arange(width, dtype=torch.int32, device=counts.device)
    index = torch.zeros(len(counts), width, dtype=torch.int32, device=counts.device)
    if blocks.kv.numel():
        places = (blocks.starts[:-1, None] + columns).clamp_(max=blocks.kv.numel() - 1)
        entries = blocks.kv.index_select(0, places.flatten()).view_as(index)
        index = torch.where(columns < counts[:, None], entries, index)
    shape = 1, blocks.heads, blocks.q_blocks
    return counts.view(shape), index.view(*shape, width)


def block_sizes(tiles: Tiles, device: torch.device) -> Tensor | None:
    """Return the keys of each kv block, int32 [kv blocks], if the last one is ragged."""
    ragged = tiles.kv_len % tiles.block_k
    if not ragged:
        return None

    def make() -> Tensor:
        count = -(-tiles.kv_len // tiles.block_k)
        sizes = torch.full((count,), tiles.block_k, dtype=torch.int32, device=device)
        sizes[-1:].fill_(ragged)
        return sizes

    return tiles.cached(("block sizes", device), make)
