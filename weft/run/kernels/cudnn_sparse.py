"""cudnn.block_sparse_attention, of nvidia-cudnn-frontend: block-sparse attention, forward and backward.

Weft has not run it on a GPU: `make test-cuda` compiles these calls, and `parity` tests it at first use.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from weft.run.kernels import Sums, aligned
from weft.run.kernels.lists import block_sizes, padded_lists
from weft.run.kernels.packages import PackageKernel
from weft.run.kernels.tiles import Tiles

_far_aligned = partial(aligned, size=128)
"""As its forward on sm_90 for blocks of 64 assumes that pointers are."""


class CudnnSparse(PackageKernel):
    """16-bit operands and results, float32 log-sum-exp. Gradients are added in any order."""

    name, module, extra = "cudnn_sparse", "cudnn.block_sparse_attention", "cudnn"

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Sums:
        arch = self.check(q, k, tiles, scale)
        rows, kernel = q.shape[2], (arch, tiles.block_q)
        if kernel == ("sm_90", 64) and rows % 64:
            q = pad(q, (0, 0, 0, -rows % 64))
        ready = {("sm_90", 64): _far_aligned, ("sm_100", 128): _compact}.get(kernel, aligned)
        q, k, v = (ready(x) for x in (q, k, v))
        lists, options = self._options(tiles, q, scale)
        # Packed heads would require lists that all heads of a group share.
        result = self._package.block_sparse_attention_forward(
            q, k, v, lists.index, pack_gqa=False, allow_empty_block_nums=lists.has_empty, **options
        )
        return result["o_tensor"][:, :, :rows], result["lse_tensor"][:, :, :rows]

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        arch = self.check(q, k, tiles, scale, backward=True)
        out, lse = done
        ready = _compact if arch == "sm_100" else aligned
        operands = (ready(x.to(q.dtype)) for x in (grad, q, k, v, out))
        lists, options = self._options(tiles, q, scale)
        result = self._package.block_sparse_attention_backward(
            *operands, lse.contiguous(), lists.index, **options
        )
        return result["dq_tensor"], result["dk_tensor"], result["dv_tensor"]

    def _options(self, tiles: Tiles, q: Tensor, scale: float) -> tuple[Any, dict[str, Any]]:
        """Return the lists of kv blocks and the options of both directions.

        Counts are always passed: a fixed count would have to be even on sm_100.
        """
        lists = padded_lists(tiles, q.device, batch=q.shape[0])
        return lists, {
            "q2k_block_nums": lists.counts,
            "block_sizes": block_sizes(tiles, q.device),
            "sparse_block_size": tiles.block_q,
            "softmax_scale": scale,
            "layout": "bhsd",
        }


def _compact(x: Tensor) -> Tensor:
    """Return x without gaps, heads or tokens first: kernels of sm_100 take no view of a larger tensor.

    The stride of a batch of one matters too, so `is_contiguous` is not enough.
    """
    x = aligned(x)
    _, heads, tokens, dim = x.shape
    per_head, per_token = tokens * dim, heads * dim
    orders = (per_head, dim, 1), (dim, per_token, 1)
    is_compact = x.stride(0) == heads * per_head and x.stride()[1:] in orders
    return x if is_compact else x.clone(memory_format=torch.contiguous_format)
