"""Exact kernel: torch's fused attention in float32 or float64, the same on any number of ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.run.kernels import Sums, aligned, packed
from weft.run.kernels.merge import MergingKernel
from weft.run.kernels.reference import ReferenceKernel, widen
from weft.run.kernels.rows import Grads, attend_rows, backward_rows
from weft.run.kernels.tiles import Tiles

_aten: Any = torch.ops.aten
_written_out = ReferenceKernel()
LSE_ROWS = 32
"""Rows that memory-efficient attention's backward reads at a time; rows past the end must have weight 0."""


class Exact(MergingKernel):
    """Torch's flash attention on CPUs, and its memory-efficient attention on GPUs.

    16-bit inputs are widened first: rounding the partial outputs of each rank to 16 bits would make the
    result depend on the number of ranks.
    """

    name = "exact"
    grouped = False

    def __init__(self, ops: Any = None) -> None:
        """`ops` replaces torch's operators for GPUs in tests."""
        self._ops = ops

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Sums:
        q, k, v = (packed(widen(x)) for x in (q, k, v))
        forward = partial(self._forward, scale=scale)
        return attend_rows(forward, q, k, v, tiles) if tiles.sparse else forward(q, k, v)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> Grads:
        grad, q, k, v = (packed(widen(x)) for x in (grad, q, k, v))
        out, lse = packed(widen(done[0])), done[1]
        backward = partial(self._backward, scale=scale)
        if not tiles.sparse:
            return backward(grad, q, k, v, out, lse)
        return backward_rows(backward, grad, q, k, v, (out, lse), tiles)

    def _forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Sums:
        if self._ops is None and q.device.type == "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, False, scale=scale)
        if q.dtype == torch.float64:  # which torch has no fused attention for on GPUs
            return _written_out.attend(q, k, v, _dense(q, k), scale)
        ops, rows, width = self._ops or _aten, q.shape[2], q.shape[3]
        q, k, v = (_in_fours(x) for x in (q, k, v))
        out, lse, *_ = ops._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=scale)
        return out[..., :width], lse[..., :rows]

    def _backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Grads:
        if self._ops is None and q.device.type == "cpu":
            return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, out, lse, 0.0, False, scale=scale
            )
        if q.dtype == torch.float64:
            return _written_out.attend_backward(grad, q, k, v, (out, lse), _dense(q, k), scale)
        ops, width = self._ops or _aten, q.shape[3]
        grad, q, k, v, out = (_in_fours(x) for x in (grad, q, k, v, out))
        nothing = q.new_zeros((), dtype=torch.int64)
        wants = [True, True, True, False]
        *grads, _ = ops._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, None, out, _in_whole_reads(lse), nothing, nothing, 0.0, wants, False, scale=scale
        )
        dq, dk, dv = (x[..., :width] for x in grads)
        return dq, dk, dv


def _in_fours(x: Tensor) -> Tensor:
    """Pad and align rows to 16 bytes, as memory-efficient attention loads them."""
    short = -x.shape[-1] % 4
    return F.pad(x, (0, short)) if short else aligned(x)


def _dense(q: Tensor, k: Tensor) -> Tiles:
    return Tiles(None, q.shape[2], k.shape[2], q.shape[2], k.shape[2])


def _in_whole_reads(lse: Tensor) -> Tensor:
    """Pad an lse to whole reads, with +inf: rows past the end get weight 0."""
    rows = -(-lse.shape[2] // LSE_ROWS) * LSE_ROWS
    padded = lse.new_full((*lse.shape[:2], rows), torch.inf)
    padded[..., : lse.shape[2]].copy_(lse)
    return padded
