"""Stand-ins for flash-attn-4 and cuDNN's block-sparse attention: they raise where those would, and compute.

What they check and compute was read from the pinned versions. Where a package checks nothing and would be
silently wrong (the order of lists, keys past a ragged end), they are wrong in the same way.

    kernel = Fa4(FlashAttention4("sm_90"), "sm_90")
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.run.cuda_contracts import check_aligned, require

HALF = (torch.bfloat16, torch.float16)
_GRADS = ("dq_tensor", "dk_tensor", "dv_tensor")


class BlockSparseTensors(NamedTuple):
    """flash_attn.cute.block_sparsity.BlockSparseTensorsTorch."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_total_m_blocks: None = None
    cu_block_idx_offsets: None = None
    block_size: tuple[int, int] | None = None


class FlashAttention4:
    """The module flash_attn.cute.interface on one architecture. `calls` has what was called."""

    BlockSparseTensorsTorch = BlockSparseTensors

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.calls: list[str] = []

    def _flash_attn_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float | None = None,
        block_sparse_tensors: BlockSparseTensors | None = None, return_lse: bool = False,
    ) -> tuple[Tensor, Tensor | None, None, None, None]:  # fmt: skip
        self.calls.append("dense forward" if block_sparse_tensors is None else "sparse forward")
        self._check(q, k, v)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if block_sparse_tensors is not None:
            rows, columns = block_sparse_tensors.block_size
            tile = 64 if self.arch == "sm_90" else 256 if q.shape[2] > 128 and q.shape[3] < 256 else 128
            fits = columns % 128 == 0 if self.arch == "sm_100" else columns % 16 == 0 and columns <= 128
            require(rows % tile == 0, f"block size {rows} must be a multiple of {tile}")
            require(fits, f"sparse_block_size[1]={columns} to match tile_n=128")
        reads = self._reads(block_sparse_tensors, q, k)
        out, lse = attend(q, k, v, softmax_scale, reads)
        return out.to(q.dtype).transpose(1, 2).contiguous(), lse if return_lse else None, None, None, None

    def _flash_attn_bwd(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor,
        softmax_scale: float | None = None, block_sparse_tensors: BlockSparseTensors | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        self.calls.append("dense backward" if block_sparse_tensors is None else "sparse backward")
        self._check(q, k, v, out, dout)
        q, k, v, out, dout = (x.transpose(1, 2) for x in (q, k, v, out, dout))
        require(lse.shape == q.shape[:3] and lse.dtype == torch.float32, "lse must have shape (B, H, S)")
        if block_sparse_tensors is not None:
            rows, columns = block_sparse_tensors.block_size
            tile = 128 if self.arch == "sm_100" or q.shape[3] <= 64 else 64
            require(rows % tile == 0, f"sparse_block_size[0] must be a multiple of tile_m={tile}")
            keys = 128 if q.shape[3] <= 128 else 96 if q.shape[3] <= 192 else 64
            fits = columns % 128 == 0 if self.arch == "sm_100" else columns == keys
            require(fits, f"sparse_block_size[1]={columns} to match tile_n={keys}")
        reads = self._reads(block_sparse_tensors, q, k, backward=True)
        grads = backward(dout, q, k, v, out, lse, softmax_scale, reads)
        dq, dk, dv = (x.to(q.dtype).transpose(1, 2) for x in grads)
        return dq, dk, dv

    def _check(self, *tensors: Tensor) -> None:
        q, k, v, *of_queries = tensors
        require(q.dtype in HALF and len({x.dtype for x in tensors}) == 1, "inputs must have the same dtype")
        require(k.shape == v.shape and k.shape[0] == q.shape[0], "shapes of q, k, v are (B, S, H, D)")
        require(all(x.shape == q.shape for x in of_queries), "out and dout have the shape of q")
        require(q.shape[2] % k.shape[2] == 0, "num_head must be divisible by num_head_kv")
        limit = 256 if self.arch == "sm_90" else 128
        fits = q.shape[3] <= limit or (self.arch == "sm_100" and q.shape[3] == 256)
        require(q.shape[3] % 8 == 0 and fits, "head_dim is not supported")

    def _reads(
        self, lists: BlockSparseTensors | None, q: Tensor, k: Tensor, *, backward: bool = False
    ) -> Tensor | None:
        """Which keys each query reads [B, H, rows, keys of whole blocks]."""
        if lists is None:
            return None
        counts, index, sizes = lists.full_block_cnt, lists.full_block_idx, lists.block_size
        require(counts is not None and index is not None, "'NoneType' object is not subscriptable")
        for x in lists[:4]:
            require(x is not None and x.dtype == torch.int32, "block tensors must have dtype torch.int32")
        require(not lists.mask_block_cnt.any(), "a partial block needs a mask_mod")
        rows, columns = (-(-x.shape[2] // size) for x, size in zip((q, k), sizes, strict=True))
        expected = (1, q.shape[1], columns if backward else rows)
        require(counts.shape == expected == index.shape[:3], "cannot be expanded to expected shape")
        require(index.shape[3] <= (rows if backward else columns), "n-block dimension")
        reads = torch.zeros(q.shape[1], rows * sizes[0], columns * sizes[1], dtype=torch.bool)
        for (_, head, at), entries in listed(counts, index):
            for number, entry in enumerate(entries):
                row, column = (entry, at) if backward else (at, entry)
                # The forward masks the end of the last entry alone.
                end = k.shape[2] if backward or number == len(entries) - 1 else reads.shape[2]
                span = slice(column * sizes[1], min((column + 1) * sizes[1], end))
                reads[head, row * sizes[0] : (row + 1) * sizes[0], span] = True
        return reads[None, :, : q.shape[2]].expand(q.shape[0], -1, -1, -1)


class CudnnBlockSparse:
    """The module cudnn.block_sparse_attention on one architecture."""

    def __init__(self, arch: str) -> None:
        self.arch = arch
        self.calls: list[str] = []

    def block_sparse_attention_forward(
        self, q: Tensor, k: Tensor, v: Tensor, index: Tensor, block_sparse_num: None = None,
        block_sizes: Tensor | None = None, q2k_block_nums: Tensor | None = None, *,
        sparse_block_size: int, allow_empty_block_nums: bool = False, softmax_scale: float | None = None,
        pack_gqa: bool | None = None, layout: str = "bhsd",
    ) -> dict[str, Tensor]:  # fmt: skip
        self.calls.append("forward")
        require(block_sparse_num is None, "counts are passed instead")
        kind = self.arch, sparse_block_size
        self._check(q, k, v, index, q2k_block_nums, block_sizes, sparse_block_size)
        require(layout == "bhsd" and pack_gqa is False, "packed heads have other lists")
        dims = (128,) if kind == ("sm_100", 64) or self.arch == "sm_120" else (64, 96, 128)
        require(q.shape[3] in dims, "head dims of the forward")
        require(kind != ("sm_90", 64) or q.shape[2] % 64 == 0, "seqlen_q must be a multiple of 64")
        require(kind != ("sm_100", 64) or q.dtype == torch.bfloat16, "blk64 forward requires BF16")
        require(kind != ("sm_100", 64) or q.shape[1] == k.shape[1], "blk64 forward supports MHA only")
        for x in (q, k, v):
            check_aligned(x)
            far = x.storage_offset() * x.element_size() % 128 == 0
            require(kind != ("sm_90", 64) or far, "assumed alignment of 128 bytes")
            require(kind != ("sm_100", 128) or is_compact(x), "stride_order is not consistent")
        require(allow_empty_block_nums or bool(q2k_block_nums.all()), "counts of 0 are not expected")
        out, lse = attend(q, k, v, softmax_scale, self._reads(q, k, index, q2k_block_nums, block_sizes))
        return {"o_tensor": out.to(q.dtype), "lse_tensor": lse}

    def block_sparse_attention_backward(
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, index: Tensor,
        block_sparse_num: None = None, block_sizes: Tensor | None = None,
        q2k_block_nums: Tensor | None = None, *, softmax_scale: float | None = None,
        sparse_block_size: int, layout: str = "bhsd",
    ) -> dict[str, Tensor]:  # fmt: skip
        self.calls.append("backward")
        require(block_sparse_num is None, "counts are passed instead")
        self._check(q, k, v, index, q2k_block_nums, block_sizes, sparse_block_size)
        require(self.arch != "sm_120" and layout == "bhsd", "backward requires SM90-SM110")
        require(q.dtype == torch.bfloat16 and q.shape[1] == k.shape[1], "backward requires BF16 and MHA")
        dims = (64, 128) if (self.arch, sparse_block_size) == ("sm_100", 128) else (128,)
        require(q.shape[3] in dims, "head dims of the backward")
        require(lse.shape == q.shape[:3] and lse.dtype == torch.float32, "lse_tensor shape")
        require(lse.is_contiguous(), "lse in one piece")
        for x in (do, q, k, v, o):
            require(x.dtype == q.dtype, "do_tensor and o_tensor must have the same dtype as q_tensor")
            check_aligned(x)
            require(self.arch != "sm_100" or is_compact(x), "stride_order is not consistent")
        reads = self._reads(q, k, index, q2k_block_nums, block_sizes)
        grads = backward(do, q, k, v, o, lse, softmax_scale, reads)
        return {name: x.to(q.dtype) for name, x in zip(_GRADS, grads, strict=True)}

    def _check(
        self, q: Tensor, k: Tensor, v: Tensor, index: Tensor, counts: Tensor | None,
        sizes: Tensor | None, block: int,
    ) -> None:  # fmt: skip
        require(block in (64, 128), "sparse_block_size must be 64 or 128")
        require(q.dtype in HALF and q.dtype == k.dtype == v.dtype, "same float16 or bfloat16 dtype")
        require(k.shape == v.shape and q.shape[1] % k.shape[1] == 0, "shapes of q, k, v")
        self.block = block
        prefix = q.shape[0], q.shape[1], -(-q.shape[2] // block)
        require(index.dtype == torch.int32 and index.shape[:3] == prefix, f"index prefix must be {prefix}")
        require(index.shape[3] >= 1 and index.is_contiguous(), "non-empty KV-block capacity")
        require(counts is not None, "weft always passes counts: a fixed one must be even on sm_100")
        require(counts.dtype == torch.int32 and counts.shape == prefix, f"counts must be {prefix}")
        blocks = -(-k.shape[2] // block)
        require(sizes is None or (sizes.dtype == torch.int32 and sizes.shape == (blocks,)), "block_sizes")

    def _reads(self, q: Tensor, k: Tensor, index: Tensor, counts: Tensor, sizes: Tensor | None) -> Tensor:
        block = self.block
        rows, columns = (-(-x.shape[2] // block) for x in (q, k))
        reads = torch.zeros(*q.shape[:2], rows * block, columns * block, dtype=torch.bool)
        for (batch, head, row), entries in listed(counts, index):
            for entry in entries:
                size = block if sizes is None else int(sizes[entry])
                span = slice(entry * block, entry * block + size)
                reads[batch, head, row * block : (row + 1) * block, span] = True
        return reads[:, :, : q.shape[2]]


def is_compact(x: Tensor) -> bool:
    """Strides without a gap, in the order of heads or of tokens; also that of a batch of one."""
    _, heads, tokens, dim = x.shape
    whole = heads * tokens * dim
    return x.stride() in ((whole, tokens * dim, dim, 1), (whole, dim, heads * dim, 1))


def listed(counts: Tensor, index: Tensor) -> Iterator[tuple[tuple[int, ...], list[int]]]:
    """(place, entries) of every list; all that a kernel might load must be there, also behind the count."""
    for place in torch.cartesian_prod(*(torch.arange(n) for n in counts.shape)).tolist():
        entries = index[tuple(place)].tolist()
        require(min(entries) >= 0, "a block that exists")
        yield tuple(place), entries[: counts[tuple(place)]]


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, reads: Tensor | None
) -> tuple[Tensor, Tensor]:
    """In float32; keys past the end are 0, as the memory that a GPU loads there."""
    scores, (_, values) = scores_of(q, k, v, scale, reads)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf).unsqueeze(-1))
    return weights @ values, lse


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float | None,
    reads: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    scores, (keys, values) = scores_of(q, k, v, scale, reads)
    weights = torch.exp(scores - lse.unsqueeze(-1))
    grad, delta = grad.float(), (grad.float() * out.float()).sum(-1, keepdim=True)
    slope = weights * (grad @ values.mT - delta) * scale
    dk, dv = (
        x.unflatten(1, (k.shape[1], -1)).sum(2)[:, :, : k.shape[2]]
        for x in (slope.mT @ q.float(), weights.mT @ grad)
    )
    return slope @ keys, dk, dv


def scores_of(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, reads: Tensor | None
) -> tuple[Tensor, list[Tensor]]:
    require(scale is not None, "weft always passes the scale")
    more = 0 if reads is None else reads.shape[3] - k.shape[2]
    group = q.shape[1] // k.shape[1]
    keys, values = (F.pad(x.float(), (0, 0, 0, more)).repeat_interleave(group, 1) for x in (k, v))
    scores = q.float() @ keys.mT * scale
    return (scores if reads is None else scores.masked_fill(~reads, -torch.inf)), [keys, values]
