"""Differentiable attention by any of the kernels, on a list of active blocks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.core.errors import InputError
from weft.run.kernels import AttentionKernel, Sums, choose, guarded
from weft.run.kernels.parity import parity_check
from weft.run.kernels.rules import KernelSpec
from weft.run.kernels.tiles import Blocks, Tiles
from weft.run.transforms import refused


@lru_cache(64)
def _chosen(backend: str, device: str, spec: KernelSpec) -> AttentionKernel:
    return choose(backend, spec.dtype, device, spec, parity_check(None, torch.device(device)))


def attend(  # noqa: PLR0913 - the sizes that a list of blocks does not have
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Blocks | None,
    *,
    scale: float,
    block_q: int,
    block_k: int,
    backend: str = "auto",
) -> Sums:
    """Return (out, lse) of q [B, H, S, D] over the active blocks of k, v [B, H, T, D]; None is all blocks.

    Only the last block may be ragged. The output is float32 or better, or in 16 bits where a GPU backend
    computes in them; lse is float32 or better, natural-log, without gradient.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    expected = (q.shape[1], -(-q_len // block_q), -(-kv_len // block_k))
    if blocks is not None and (blocks.heads, blocks.q_blocks, blocks.kv_blocks) != expected:
        shape = (blocks.heads, blocks.q_blocks, blocks.kv_blocks)
        raise InputError(f"blocks must have {expected} (heads, q blocks, kv blocks), got {shape}.")
    # Lists stay on their device: reading those of a GPU would wait for it.
    tiles = Tiles(None, block_q, block_k, q_len, kv_len, listed=blocks)
    spec = KernelSpec.of_operands(q, k, tiles, scale)
    kernel = _chosen(backend, str(q.device), spec)
    out, lse = _Attend.apply(q, k, v, tiles, scale, kernel)
    return out, lse


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, kernel: AttentionKernel
    ) -> Any:
        out, lse = kernel.attend(q, k, v, tiles, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = tiles, scale, kernel
        ctx.mark_non_differentiable(lse)
        return out, lse

    jvp = refused("attend has no tangent.", "weft.attention has, on one rank too.")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        tiles, scale, kernel = ctx.options
        grads = kernel.attend_backward(grad, q, k, v, (out, guarded(lse)), tiles, scale)
        return *(g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None, None, None
