"""`attend`: one differentiable call over any of the kernels, on a list of active blocks."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.core.errors import InputError
from weft.run.kernels import Kernel, Sums, choose, guarded
from weft.run.kernels.parity import judge
from weft.run.kernels.rules import Work
from weft.run.kernels.tiles import Blocks, Tiles
from weft.run.transforms import refused


@lru_cache(64)
def _chosen(backend: str, dtype: str, device: str, work: Work) -> Kernel:
    return choose(backend, dtype, device, work, judge(None, torch.device(device)))


def attend(  # noqa: PLR0913 - the sizes that a list of blocks does not tell
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
    """(out, lse) of q [B, H, S, D] over the active blocks of k, v [B, H, T, D]; None is all of them.

    Lengths are those of the tensors; only the last block may be ragged. The output is float32 or better, or
    in 16 bits where a GPU backend computes in them; lse is float32 or better, natural-log, without gradient.
    """
    q_len, kv_len = q.shape[2], k.shape[2]
    expected = (q.shape[1], -(-q_len // block_q), -(-kv_len // block_k))
    if blocks is not None and (blocks.heads, blocks.q_blocks, blocks.kv_blocks) != expected:
        given = (blocks.heads, blocks.q_blocks, blocks.kv_blocks)
        raise InputError(f"blocks are for (heads, q blocks, kv blocks) {given}, the tensors need {expected}.")
    # Lists stay where they are: reading those of a GPU would wait for it.
    tiles = Tiles(None, block_q, block_k, q_len, kv_len, listed=blocks)
    dtype = str(q.dtype).removeprefix("torch.")
    work = Work(
        blocks is not None,
        backward=False,
        head_dim=q.shape[3],
        dtype=dtype,
        block_q=block_q,
        block_k=block_k,
        group=q.shape[1] // k.shape[1],
        positive=scale > 0,
    )
    kernel = _chosen(backend, dtype, str(q.device), work)
    out, lse = _Attend.apply(q, k, v, tiles, scale, kernel)
    return out, lse


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, kernel: Kernel) -> Any:
        out, lse = kernel.attend(q, k, v, tiles, scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.given = tiles, scale, kernel
        ctx.mark_non_differentiable(lse)
        return out, lse

    jvp = refused("attend has no tangent.", "weft.attention has, on one rank too.")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        tiles, scale, kernel = ctx.given
        grads = kernel.attend_backward(grad, q, k, v, (out, guarded(lse)), tiles, scale)
        return *(g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None, None, None
