"""flash-attn-4: dense and block-sparse attention, forward and backward, through the package's own module.

Its explicit passes are private; the extra `fa4` pins the one version whose signatures are known here.
It never ran on a GPU for weft: `make test-cuda` compiles what is called here, `parity` tests it at first use.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.run.kernels import Merging, Sums, aligned
from weft.run.kernels.gpu import on_device
from weft.run.kernels.lists import padded_lists
from weft.run.kernels.machine import arch_of
from weft.run.kernels.package_rules import fa4
from weft.run.kernels.packages import check, load
from weft.run.kernels.tiles import Tiles


class Fa4(Merging):
    """16-bit operands and results, float32 log-sum-exp. Gradients of queries are added in any order."""

    name = "fa4"
    grouped = True

    def __init__(self, package: Any = None, arch: str = "") -> None:
        """Tests give a stand-in of the package's module and the architecture that it stands for."""
        self._package = package or load(self.name, "flash_attn.cute.interface", "fa4")
        self._arch = arch

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Sums:
        check(fa4, self._arch or arch_of(q.device), q, k, tiles, scale, backward=False)
        q, k, v = (_tokens_first(x) for x in (q, k, v))
        with on_device(q.device):
            out, lse, *_ = self._package._flash_attn_fwd(
                q, k, v, softmax_scale=scale, block_sparse_tensors=self._blocks(tiles, q), return_lse=True
            )
        return out.transpose(1, 2), lse

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        check(fa4, self._arch or arch_of(q.device), q, k, tiles, scale, backward=True)
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
        """The package's lists; the backward reads the transposed ones."""
        if not tiles.sparse:
            return None
        key = self.name, q.device, inverted
        return tiles.cached(key, lambda: self._make_blocks(tiles, q.device, inverted=inverted))

    def _make_blocks(self, tiles: Tiles, device: torch.device, *, inverted: bool) -> Any:
        lists = padded_lists(tiles, device, inverted=inverted)
        # Every block is wholly active. Without lists of partial blocks the kernels do not compile.
        return self._package.BlockSparseTensorsTorch(
            mask_block_cnt=torch.zeros_like(lists.counts),
            mask_block_idx=torch.zeros_like(lists.index[..., :1]),
            full_block_cnt=lists.counts,
            full_block_idx=lists.index,
            block_size=(tiles.block_q, tiles.block_k),
        )


def _tokens_first(x: Tensor) -> Tensor:
    """[B, H, S, D] as [B, S, H, D], a view."""
    return aligned(x).transpose(1, 2)
