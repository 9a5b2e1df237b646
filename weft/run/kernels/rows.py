"""Compute sparse tiles by a dense kernel: one call for each distinct row of blocks, over gathered keys.

Heads that read the same keys in a row of blocks share a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.run.kernels import Sums
from weft.run.kernels.tiles import Tiles

Grads = tuple[Tensor, Tensor, Tensor]
Forward = Callable[[Tensor, Tensor, Tensor], Sums]
Backward = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Grads]
"""(grad, q, k, v, out, lse) to (dq, dk, dv)."""


class RowGroup(NamedTuple):
    """Queries and keys of one call: positions among (head, token) pairs of `heads` heads."""

    heads: int
    queries: Tensor
    keys: Tensor


def attend_rows(forward: Forward, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles) -> Sums:
    """Compute attention over sparse tiles; `forward` computes dense ones."""
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = q.new_full(q.shape[:-1], -torch.inf, dtype=torch.promote_types(q.dtype, torch.float32))
    queries, keys, values = (_flat(x) for x in (q, k, v))
    for row in rows_of(tiles, q.device):
        row_out, row_lse = forward(
            *(_pick(x, at, row.heads) for x, at in _operands(row, queries, keys, values))
        )
        for into, x in ((out, row_out), (lse.unsqueeze(-1), row_lse.unsqueeze(-1))):
            into.view(len(into), -1, into.shape[-1]).index_copy_(1, row.queries, _flat(x))
    return out, lse


def backward_rows(
    backward: Backward, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles
) -> Grads:
    """Compute gradients of sparse tiles, in float32 or better; `backward` computes dense ones."""
    wide = torch.promote_types(q.dtype, torch.float32)
    grads = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v)]
    dq, dk, dv = (x.view(len(x), -1, x.shape[-1]) for x in grads)
    by_query = [_flat(x) for x in (grad, done[0], done[1].unsqueeze(-1))]
    queries, keys, values = (_flat(x) for x in (q, k, v))
    for row in rows_of(tiles, q.device):
        slope, out, lse = (_pick(x, row.queries, row.heads) for x in by_query)
        operands = [_pick(x, at, row.heads) for x, at in _operands(row, queries, keys, values)]
        parts = backward(slope, operands[0], operands[1], operands[2], out, lse.squeeze(-1))
        # No position is twice in a row, so the additions are deterministic.
        for into, at, x in zip((dq, dk, dv), (row.queries, row.keys, row.keys), parts, strict=True):
            into.index_add_(1, at, _flat(x).to(wide))
    return grads[0], grads[1], grads[2]


def rows_of(tiles: Tiles, device: torch.device) -> tuple[RowGroup, ...]:
    """Return the distinct rows of blocks, with positions on the device."""
    return tiles.cached(("rows", device), lambda: tuple(_rows(tiles, device)))


def _rows(tiles: Tiles, device: torch.device) -> Iterator[RowGroup]:
    active = tiles.host
    for row in range(active.shape[1]):
        alike: dict[bytes, list[int]] = {}
        for head, columns in enumerate(active[:, row]):
            if columns.any():
                alike.setdefault(columns.tobytes(), []).append(head)
        queries = np.arange(row * tiles.block_q, min((row + 1) * tiles.block_q, tiles.q_len))
        for heads in alike.values():
            columns = np.repeat(active[heads[0], row], tiles.block_k)[: tiles.kv_len]
            keys = np.flatnonzero(columns)
            at = (
                torch.from_numpy(np.add.outer(np.array(heads) * length, tokens).ravel()).to(device)
                for length, tokens in ((tiles.q_len, queries), (tiles.kv_len, keys))
            )
            yield RowGroup(len(heads), *at)


def _operands(row: RowGroup, q: Tensor, k: Tensor, v: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    return (q, row.queries), (k, row.keys), (v, row.keys)


def _flat(x: Tensor) -> Tensor:
    """[B, H, S, D] as [B, H · S, D]."""
    return x.reshape(x.shape[0], -1, x.shape[-1])


def _pick(x: Tensor, at: Tensor, heads: int) -> Tensor:
    picked = x.index_select(1, at)
    return picked.view(picked.shape[0], heads, -1, picked.shape[-1])
