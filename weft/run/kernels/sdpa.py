"""Fused attention of torch on GPUs, in 16 bits with its log-sum-exp: flash attention and cuDNN.

Both compute dense tiles; `weft.run.kernels.merge` sums partial results in float32. Users may activate
FlashAttention-3 or -4 in torch for the whole process: `flash` calls what is active.
"""
# ruff: noqa: FBT003 - torch's operators take their flags by position

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import InputError
from weft.run.kernels import Sums, aligned
from weft.run.kernels.merge import MergingKernel
from weft.run.kernels.rows import Grads, attend_rows, backward_rows
from weft.run.kernels.rules import FLASH_DIMS
from weft.run.kernels.tiles import Tiles

_aten: Any = torch.ops.aten
LAST_TRAINED_DIM = 192
"""Torch's flash attention has no backward for head dims from 193 to 224 on sm_86, sm_89 and sm_120."""


class Flash(MergingKernel):
    """torch.ops.aten._scaled_dot_product_flash_attention and its backward."""

    name = "flash"
    grouped = True

    def __init__(self, ops: Any = None) -> None:
        """`ops` replaces torch's operators in tests."""
        self._ops = ops or _aten
        self._seeds: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Sums:
        self._check(tiles)
        return self.forward(q, k, v, scale)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> Grads:
        self._check(tiles)
        return self.backward(grad, q, k, v, *done, scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Sums:
        """Return (out in 16 bits, lse) of dense tiles."""
        width = q.shape[-1]
        q, k, v = (_ready(x) for x in (q, k, v))
        out, lse, *_ = self._ops._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=scale)
        return out[..., :width], lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Grads:
        """Return (dq, dk, dv) of dense tiles, in 16 bits."""
        width = q.shape[-1]
        grad, out = grad.to(q.dtype), out.to(q.dtype)
        grad, q, k, v, out = (_ready(x) for x in (grad, q, k, v, out))
        seed, offset = self.seeds(q.device)
        lengths = (None, None, q.shape[2], k.shape[2])
        grads = self._ops._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.contiguous(), *lengths, 0.0, False, seed, offset, scale=scale
        )
        dq, dk, dv = (x[..., :width] for x in grads)
        return dq, dk, dv

    def seeds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return a random generator state, which is required but not read without dropout."""
        if device not in self._seeds:
            kind, count = (torch.int64, ()) if torch.version.hip else (torch.uint64, (2,))
            seed, offset = (torch.zeros(shape, dtype=kind, device=device) for shape in (count, ()))
            self._seeds[device] = seed, offset
        return self._seeds[device]

    def _check(self, tiles: Tiles) -> None:
        if tiles.sparse:
            raise InputError(f"backend={self.name!r} takes dense tiles, not sparse ones.", hint="Use 'auto'.")


class Cudnn(Flash):
    """torch.ops.aten._scaled_dot_product_cudnn_attention and its backward.

    It does not support a single key, which torch's flash attention computes.
    """

    name = "cudnn"

    def __init__(self, ops: Any = None) -> None:
        super().__init__(ops)
        probe = torch.empty(1, 1, 8, 8, dtype=torch.bfloat16, device="meta")
        _, lse, *_ = _aten._scaled_dot_product_cudnn_attention(probe, probe, probe, None, True)
        self._lse_dims = lse.ndim  # it differs between versions of torch

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Sums:
        if k.shape[2] == 1:
            return super().forward(q, k, v, scale)
        q, k, v = (aligned(x) for x in (q, k, v))
        out, lse, *_ = self._ops._scaled_dot_product_cudnn_attention(
            q, k, v, None, True, 0.0, False, False, scale=scale
        )
        return out, lse.squeeze(-1) if lse.ndim == 4 else lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
    ) -> Grads:
        if k.shape[2] == 1:
            return super().backward(grad, q, k, v, out, lse, scale)
        grad, out = grad.to(q.dtype), out.to(q.dtype)
        grad, q, k, v, out = (aligned(x) for x in (grad, q, k, v, out))
        lse = lse.contiguous()
        lse = lse.unsqueeze(-1) if self._lse_dims == 4 else lse
        lengths = (None, None, q.shape[2], k.shape[2])
        seeds = self.seeds(q.device)
        return self._ops._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, lse, *seeds, None, *lengths, 0.0, False, scale=scale
        )

    def seeds(self, device: torch.device) -> tuple[Tensor, Tensor]:
        if device not in self._seeds:
            zero = torch.zeros(1, dtype=torch.int64, device=device)
            self._seeds[device] = zero, zero
        return self._seeds[device]


class GatheredFlash(Flash):
    """Compute sparse tiles by flash attention over the gathered keys of each distinct row of blocks."""

    name = "gather"
    grouped = False

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Sums:
        return attend_rows(partial(self.forward, scale=scale), q, k, v, tiles)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> Grads:
        grad, out = grad.to(q.dtype), done[0].to(q.dtype)
        return backward_rows(partial(self.backward, scale=scale), grad, q, k, v, (out, done[1]), tiles)


def _ready(x: Tensor) -> Tensor:
    """Pad the head dim to a multiple of 8 that torch's flash attention has a backward for on all GPUs."""
    width = x.shape[-1]
    padded = FLASH_DIMS if width > LAST_TRAINED_DIM else -(-width // 8) * 8
    return aligned(x) if padded == width else F.pad(x, (0, padded - width))
