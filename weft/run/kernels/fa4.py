"""flash-attn-4: dense and block-sparse attention, forward and backward, through the package's own module.

Its explicit passes are private; the extra `fa4` pins the version whose signatures are used here. Weft has not
run it on a GPU: `make test-cuda` compiles these calls, and `parity` tests it at first use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.run.kernels import Sums, aligned
from weft.run.kernels.lists import padded_lists
from weft.run.kernels.packages import PackageKernel
from weft.run.kernels.tiles import Tiles
from weft.run.kernels.triton_attention import on_device


class Fa4(PackageKernel):
    """16-bit operands and results, float32 log-sum-exp. Gradients of queries are added in any order."""

    name, module, extra = "fa4", "flash_attn.cute.interface", "fa4"

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Sums:
        self.check(q, k, tiles, scale)
        q, k, v = (_tokens_first(x) for x in (q, k, v))
        with on_device(q.device):
            out, lse, *_ = self._package._flash_attn_fwd(
                q, k, v, softmax_scale=scale, block_sparse_tensors=self._blocks(tiles, q), return_lse=True
            )
        return out.transpose(1, 2), lse

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        self.check(q, k, tiles, scale, backward=True)
        out, lse = done
        grad, out = (x.to(q.dtype) for x in (grad, out))
        q, k, v, out, grad = (_tokens_first(x) for x in (q, k, v, out, grad))
        blocks = self._blocks(tiles, q, inverted=True)
        with on_device(q.device):
            grads = self._package._flash_attn_bwd(
                q, k, v, out, grad, lse, softmax_scale=scale, block_sparse_tensors=blocks
            )
        dq, dk, dv = (x.transpose(1, 2) for x in grads)
        return dq, dk, dv

    def _blocks(self, tiles: Tiles, q: Tensor, *, inverted: bool = False) -> Any:
        """Return the lists of the package; the backward reads the inverted ones."""
        if not tiles.sparse:
            return None

        def make() -> Any:
            lists = padded_lists(tiles, q.device, inverted=inverted)
            # All blocks are full. Without lists of partial blocks the kernels do not compile.
            return self._package.BlockSparseTensorsTorch(
                mask_block_cnt=torch.zeros_like(lists.counts),
                mask_block_idx=torch.zeros_like(lists.index[..., :1]),
                full_block_cnt=lists.counts,
                full_block_idx=lists.index,
                block_size=(tiles.block_q, tiles.block_k),
            )

        return tiles.cached((self.name, q.device, inverted), make)


def _tokens_first(x: Tensor) -> Tensor:
    """Return [B, H, S, D] as a view [B, S, H, D]."""
    return aligned(x).transpose(1, 2)
