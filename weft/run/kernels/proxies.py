"""Proxies: one vector per block of tokens, whose products are the scores of pairs of blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError


def elements_per_chunk(device: torch.device) -> int:
    """Return how many numbers to compute at a time: they fit into CPU caches, or keep a GPU busy."""
    return 1 << 20 if device.type == "cpu" else 1 << 24


def pool(x: Tensor, block: int) -> Tensor:
    """Average blocks of tokens: [..., tokens, D] to [..., blocks, D], in float32 or better."""
    length = x.shape[-2]
    if length < 1 or block < 1:
        raise InputError(f"Tokens and block must be >= 1, got {length} and {block}.")
    dtype = torch.promote_types(x.dtype, torch.float32)
    means = x.new_empty(*x.shape[:-2], -(-length // block), x.shape[-1], dtype=dtype)
    full = length // block
    blocks, body = means[..., :full, :], x[..., : full * block, :].detach()
    if x.device.type != "cpu":
        torch.mean(body.unflatten(-2, (full, block)), -2, dtype=dtype, out=blocks)
    else:
        _pool_in_cache(body, block, blocks)
    if length % block:
        torch.mean(x[..., full * block :, :].detach(), -2, dtype=dtype, out=means[..., -1, :])
    return means


def _pool_in_cache(x: Tensor, block: int, means: Tensor) -> None:
    """Pool a few blocks at a time, so that half precision is widened in the cache and not in memory."""
    step = max(1, elements_per_chunk(x.device) // (block * x.shape[-1]))
    for place in np.ndindex(x.shape[:-2]):
        for at in range(0, means.shape[-2], step):
            chunk = x[place][at * block : (at + step) * block].to(means.dtype)
            torch.mean(chunk.unflatten(0, (-1, block)), dim=1, out=means[place][at : at + step])


@dataclass(frozen=True, eq=False)
class Proxies:
    """q [B, H, q blocks, r] and k [B, H, kv blocks, r]; a block's score is scale · q · k.

    `scale` (r^-0.5 if not given) has no part in a top-k; a top-p takes the softmax of the scores.
    """

    q: Tensor
    k: Tensor
    scale: float | None = None

    def __post_init__(self) -> None:
        q, k = self.q.shape, self.k.shape
        if len(q) != 4 or len(k) != 4 or q[:2] != k[:2] or q[3] != k[3] or 0 in (*q, *k):
            raise InputError(
                f"Proxies of shapes {tuple(q)} and {tuple(k)} do not fit.",
                hint="Expected [B, H, q blocks, r] and [B, H, kv blocks, r].",
            )

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, rows, _ = self.q.shape
        return batch, heads, rows, self.k.shape[2]

    @property
    def device(self) -> torch.device:
        return self.q.device

    def scores(self, heads: slice, rows: slice) -> Tensor:
        q = self.q[:, heads, rows].detach()
        q = q.to(torch.promote_types(q.dtype, torch.float32))
        k = self.k[:, heads].detach().to(q.dtype)
        scale = q.shape[-1] ** -0.5 if self.scale is None else self.scale
        return q.mul(scale) @ k.mT
