"""Partial attention with log-sum-exp, forward and backward, over the active tiles of a mask.

All backends implement `AttentionKernel`; `choose` returns one of them or raises why it cannot serve.
"""

from __future__ import annotations

from importlib import import_module
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from weft.core.backends import check_backend
from weft.core.errors import InputError

if TYPE_CHECKING:
    from weft.run.kernels.choice import ParityCheck
    from weft.run.kernels.rules import KernelSpec
    from weft.run.kernels.tiles import Tiles

_CLASSES = {
    "cpu": ("cpu", "Cpu"),
    "cudnn": ("sdpa", "Cudnn"),
    "cudnn_sparse": ("cudnn_sparse", "CudnnSparse"),
    "exact": ("exact", "Exact"),
    "fa4": ("fa4", "Fa4"),
    "flash": ("sdpa", "Flash"),
    "gather": ("sdpa", "GatheredFlash"),
    "reference": ("reference", "ReferenceKernel"),
    "triton": ("triton_attention", "TritonAttention"),
}
"""Module and class of every backend; imported when a kernel of it is made."""

Sums = tuple[Tensor, Tensor]
"""(out [B, H, S, D], natural-log lse [B, H, S]); lse is float32 or better."""


class Accumulator(NamedTuple):
    """Sums that kernels update in place."""

    out: Tensor
    lse: Tensor
    fresh: bool = False
    """Whether they are uninitialized and overwritten; then `out` may be in the dtype of q."""


class AttentionKernel(Protocol):
    """q [B, H, S, D], k and v [B, H, T, D]; rows with no active tile give 0 and lse = -inf.

    Backends for 16 bits return 16 bits; partial results are summed in float32.
    """

    name: str
    grouped: bool
    """Whether k and v may have fewer heads than q: query head h then reads head h // (H_q / H_kv)."""

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, into: Accumulator | None = None
    ) -> Sums:
        """Compute attention over the tiles; with `into`, merge it into these sums over other keys."""
        ...

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) of these tiles; `done` is the final result over *all* tiles of the rows.

        Its lse is +inf where a row has no tile at all, so that the row's weights are exactly 0.
        """
        ...


def guarded(lse: Tensor) -> Tensor:
    """Replace an lse of -inf (rows without tiles) by +inf, which makes the weights of a row exactly 0."""
    return lse.masked_fill(lse == -inf, inf)


def packed(x: Tensor) -> Tensor:
    """Return x with a last dim that is contiguous; other dims may have any strides."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned(x: Tensor, size: int = 16) -> Tensor:
    """Return x with contiguous rows at multiples of 16 bytes, as GPU kernels load them.

    The first row lies at a multiple of `size` bytes; memory itself is allocated at multiples of 256.
    """
    width = x.element_size()
    strides = (stride for stride, count in zip(x.stride()[:-1], x.shape[:-1], strict=True) if count > 1)
    begins = x.storage_offset() * width % size == 0
    if x.stride(-1) == 1 and begins and not any(stride * width % 16 for stride in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def make(backend: str) -> AttentionKernel:
    """Return a new kernel of one backend, whether or not it serves here."""
    module, name = _CLASSES[backend]
    return getattr(import_module(f"{__name__}.{module}"), name)()


def choose(
    backend: str,
    dtype: str = "float32",
    device: str = "cpu",
    spec: KernelSpec | None = None,
    check: ParityCheck | None = None,
) -> AttentionKernel:
    """Return the kernel of a backend; "auto" is the fastest that serves.

    On a GPU `spec` describes the call (its direction is ignored: both are chosen), and `check` may reject a
    backend that would serve.
    """
    check_backend(backend)
    if backend in ("exact", "reference"):
        return make(backend)
    if device.partition(":")[0] == "cuda" and backend != "cpu":
        from weft.run.kernels.composite import compose
        from weft.run.kernels.rules import KernelSpec

        default = KernelSpec(sparse=False, backward=False, head_dim=128, dtype=dtype)
        return compose(backend, spec or default, torch.device(device), check)
    if backend == "auto":
        return make("exact" if _cannot_on_host("cpu", dtype, device) else "cpu")
    if why := _cannot_on_host(backend, dtype, device):
        raise InputError(
            f"backend={backend!r} cannot serve: {why}", hint="backend='auto' takes one that can."
        )
    return make(backend)


def _cannot_on_host(backend: str, dtype: str, device: str) -> str:
    kind = device.partition(":")[0]
    if backend != "cpu":
        return f"it computes on a GPU, not on {kind}."
    if kind != "cpu" or dtype == "float64":
        return f"it computes float32, bfloat16 and float16 on the CPU, not {dtype} on {kind}."
    from weft.run.kernels.cpu import unavailable_reason

    return unavailable_reason()
