"""Stand-ins for torch's attention operators on CUDA: they raise where CUDA would, and compute on the CPU.

What they check is what torch 2.13 checks on a GPU only, or reads without a check: dtypes, head dims, strides
and pointers of 16 bytes, the shape and the padding of the log-sum-exp. They take 16-bit tensors, compute in
float32 and round to 16 bits.

    kernel = Flash(CudaOps("sm_86"))
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
Answer = tuple[Any, ...]


class ContractError(RuntimeError):
    """What a TORCH_CHECK, a misaligned address or a read past the end would be on a GPU."""


def require(holds: bool, rule: str) -> None:  # noqa: FBT001
    if not holds:
        raise ContractError(rule)


class CudaOps:
    """torch.ops.aten as it is on one architecture. `calls` counts the operators that were called."""

    def __init__(self, arch: str = "sm_90") -> None:
        self.arch = arch
        self.calls: dict[str, int] = {}

    def _scaled_dot_product_flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, dropout: float, causal: bool, debug: bool, *, scale: float
    ) -> Answer:  # fmt: skip
        self._count("flash")
        _check_plain(dropout, causal, debug)
        _check_operands(q, k, v)
        require(q.shape[3] % 8 == 0 and q.shape[3] <= 256, "head_size must be a multiple of 8, at most 256")
        out, lse = _attend(q, k, v, scale)
        state = torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64)
        return _like(out, q), lse, None, None, q.shape[2], k.shape[2], *state, None

    def _scaled_dot_product_flash_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float, causal: bool,
        seed: Tensor, offset: Tensor, *, scale: float,
    ) -> Answer:  # fmt: skip
        self._count("flash backward")
        _check_plain(dropout, causal, False)
        _check_operands(q, k, v, grad, out)
        require(
            cum_q is None and cum_k is None and (max_q, max_k) == (q.shape[2], k.shape[2]), "max_q, max_k"
        )
        width = q.shape[3]
        require(width % 8 == 0 and width <= 256, "head_size must be a multiple of 8, at most 256")
        small = self.arch in ("sm_86", "sm_89", "sm_120")
        require(not (small and 192 < width <= 224), "no training with head_dim in (192, 224] on sm86 to sm89")
        # Read by pointer, as rows of q_len numbers.
        require(lse.shape == q.shape[:3] and lse.is_contiguous(), "lse is a whole [B, H, S]")
        require(lse.dtype == torch.float32, "lse is float32")
        _check_state(q, seed, offset)
        return _backward(grad, q, k, v, out, lse, scale)

    def _scaled_dot_product_cudnn_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool,
        dropout: float, causal: bool, debug: bool, *, scale: float,
    ) -> Answer:  # fmt: skip
        self._count("cudnn")
        _check_plain(dropout, causal, debug)
        _check_operands(q, k, v)
        _check_cudnn(q, k)
        require(bias is None and lse, "without a bias, with statistics")
        out, found = _attend(q, k, v, scale)
        state = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        return _like(out, q), found.unsqueeze(-1), None, None, q.shape[2], k.shape[2], *state, None

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        seed: Tensor, offset: Tensor, bias: None, cum_q: None, cum_k: None, max_q: int, max_k: int,
        dropout: float, causal: bool, *, scale: float,
    ) -> Answer:  # fmt: skip
        self._count("cudnn backward")
        _check_plain(dropout, causal, False)
        _check_operands(q, k, v, grad, out)
        _check_cudnn(q, k)
        require(bias is None and cum_q is None and cum_k is None, "without a bias and cumulative lengths")
        require((max_q, max_k) == (q.shape[2], k.shape[2]), "max_q, max_k")
        require(lse.shape == (*q.shape[:3], 1) and lse.is_contiguous(), "statistics are [B, H, S, 1]")
        require(lse.dtype == torch.float32, "statistics are float32")
        _check_state(q, seed, offset)
        return _backward(grad, q, k, v, out, lse.squeeze(-1), scale)

    def _scaled_dot_product_efficient_attention(
        self, q: Tensor, k: Tensor, v: Tensor, bias: None, lse: bool, *, scale: float
    ) -> Answer:
        self._count("efficient")
        _check_efficient(q, k, v)
        require(bias is None and lse, "without a bias, with log-sum-exp")
        out, found = _attend(q, k, v, scale)
        rows = -(-q.shape[2] // 32) * 32
        padded = F.pad(found, (0, rows - q.shape[2]), value=torch.inf)
        return out.to(q.dtype), padded, *torch.zeros(2, dtype=torch.int64)

    def _scaled_dot_product_efficient_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: None, out: Tensor, lse: Tensor,
        seed: Tensor, offset: Tensor, dropout: float, wants: list[bool], causal: bool, *, scale: float,
    ) -> Answer:  # fmt: skip
        self._count("efficient backward")
        _check_plain(dropout, causal, False)
        _check_efficient(q, k, v, grad, out)
        require(bias is None and wants == [True, True, True, False], "three gradients, none of a bias")
        require(lse.stride(2) == 1 and lse.dtype == torch.float32, "lse is float32, with rows in one piece")
        require(q.shape[1] <= 1 or lse.stride(1) % 8 == 0, "LSE is not correctly aligned (strideH)")
        require(q.shape[0] <= 1 or lse.stride(0) % 8 == 0, "LSE is not correctly aligned (strideB)")
        require(lse.shape[2] % 32 == 0 and lse.shape[2] >= q.shape[2], "lse is read in rows of 32")
        past = lse[..., q.shape[2] :]
        require(bool((past == torch.inf).all()), "rows past the end of lse must weigh nothing")
        require(seed.device == q.device and offset.device == q.device, "the state lies on the device")
        return *_backward(grad, q, k, v, out, lse[..., : q.shape[2]], scale), None

    def _count(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1


def _check_plain(dropout: float, causal: bool, debug: bool) -> None:  # noqa: FBT001
    require((dropout, causal, debug) == (0.0, False, False), "no dropout, not causal, no debug mask")


def _check_operands(q: Tensor, k: Tensor, v: Tensor, *of_queries: Tensor) -> None:
    every = (q, k, v, *of_queries)
    require(all(x.ndim == 4 and x.numel() for x in every), "four dims, none of them 0")
    require(q.dtype in HALF and len({x.dtype for x in every}) == 1, "all in fp16 or all in bf16")
    require(k.shape == v.shape and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3], "shapes of q, k, v")
    require(all(x.shape == q.shape for x in of_queries), "gradient and output have the shape of q")
    require(q.shape[1] % k.shape[1] == 0, "heads of k and v must divide heads of q")
    for x in every:
        check_aligned(x)


def check_aligned(x: Tensor) -> None:
    """16-byte loads: of rows in one piece, from addresses that 16 divides."""
    require(x.stride(-1) == 1, "the last dimension must be contiguous")
    strides = [stride for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1]
    require(not any(stride * x.element_size() % 16 for stride in strides), "strides of 16 bytes")
    require(x.storage_offset() * x.element_size() % 16 == 0, "pointers of 16 bytes")


def _check_cudnn(q: Tensor, k: Tensor) -> None:
    require(q.shape[3] % 8 == 0 and q.shape[3] <= 128, "head_dim is a multiple of 8, at most 128")
    require(k.shape[2] != 1, "cudnn SDPA does not support key/value sequence length 1")


def _check_efficient(q: Tensor, k: Tensor, v: Tensor, *of_queries: Tensor) -> None:
    every = (q, k, v, *of_queries)
    require(q.dtype != torch.float64 and len({x.dtype for x in every}) == 1, "one dtype of at most 32 bits")
    require(q.shape[1] == k.shape[1] == v.shape[1], "as many heads of k and v as of q")
    require(q.shape[3] * q.element_size() % 16 == 0, "rows of 16 bytes: no kernel found to launch")
    for x in every:
        check_aligned(x)


def _check_state(q: Tensor, *state: Tensor) -> None:
    require(all(x.device == q.device and x.dtype.itemsize == 8 for x in state), "64-bit state on the device")


def _like(x: Tensor, q: Tensor) -> Tensor:
    """In the dtype and with the order of strides of q."""
    return torch.empty_like(q).copy_(x)


def _shared(q: Tensor, *kv: Tensor) -> list[Tensor]:
    return [x.float().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in kv]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    keys, values = _shared(q, k, v)
    scores = q.float() @ keys.mT * scale
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _shared(q, k, v)
    weights = torch.exp(q.float() @ keys.mT * scale - lse.unsqueeze(-1))
    delta = (grad.float() * out.float()).sum(-1, keepdim=True)
    slope = weights * (grad.float() @ values.mT - delta) * scale
    dk, dv = (_summed(x, k) for x in (slope.mT @ q.float(), weights.mT @ grad.float()))
    return _like(slope @ keys, q), _like(dk, k), _like(dv, v)


def _summed(x: Tensor, k: Tensor) -> Tensor:
    """Over the query heads of each head of k."""
    return x.unflatten(1, (k.shape[1], -1)).sum(2)
