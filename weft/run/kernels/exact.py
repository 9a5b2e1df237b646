"""torch's own fused attention: one call where tiles are dense, one per distinct row of blocks where not."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.run.kernels import Sums, packed
from weft.run.kernels.reference import widen
from weft.run.kernels.tiles import Tiles
from weft.run.merge import merged

_aten = torch.ops.aten


class Exact:
    """Flash attention of torch with its log-sum-exp, on CPU, and memory-efficient attention on GPUs.

    16-bit inputs are widened first: partial outputs are merged over ranks, and rounding each of them
    to 16 bits would make the result depend on the number of ranks.
    """

    name = "exact"

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        scale: float,
        into: Sums | None = None,
        *,
        fresh: bool = False,
    ) -> Sums:
        q, k, v = (_ready(x) for x in (q, k, v))
        done = _forward(q, k, v, scale) if tiles.active is None else self._by_rows(q, k, v, tiles, scale)
        return merged(done, into, fresh=fresh)

    def _by_rows(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Sums:
        out = torch.zeros_like(q, memory_format=torch.contiguous_format)
        lse = q.new_full(q.shape[:-1], -torch.inf)
        for heads, rows, keys in tiles.rows_of_work:
            columns = (slice(None), heads[:, None], keys)
            part = _forward(q[:, heads, rows], k[columns], v[columns], scale)
            out[:, heads, rows], lse[:, heads, rows] = part
        return out, lse

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v = (_ready(x) for x in (grad, q, k, v))
        out, lse = _ready(done[0]), done[1]
        if tiles.active is None:
            return _backward(grad, q, k, v, out, lse, scale)
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        for heads, rows, keys in tiles.rows_of_work:
            columns = (slice(None), heads[:, None], keys)
            row_grad, row_q, row_out, row_lse = (x[:, heads, rows] for x in (grad, q, out, lse))
            parts = _backward(row_grad, row_q, k[columns], v[columns], row_out, row_lse, scale)
            dq[:, heads, rows] = parts[0]
            # Keys of one row are distinct, so this adds and never overwrites.
            dk[columns] += parts[1]
            dv[columns] += parts[2]
        return dq, dk, dv


def _ready(x: Tensor) -> Tensor:
    """What torch's kernels take."""
    return packed(widen(x))


def _forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
        return out, lse
    out, lse, *_ = _aten._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
    return out, lse[..., : q.shape[2]]


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cpu":
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, False, scale=scale
        )
    nothing = q.new_zeros((), dtype=torch.int64, device="cpu")
    wants = [True, True, True, False]
    dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, None, out, lse, nothing, nothing, 0.0, wants, False, scale=scale
    )
    return dq, dk, dv
