"""Partial attention with log-sum-exp, forward and backward, over the active tiles of a mask.

One signature, several implementations; `choose` gives the one asked for or says why it cannot serve.
"""

from __future__ import annotations

from importlib import import_module
from math import inf
from typing import Protocol

import torch
from torch import Tensor

from weft.core.backends import BACKENDS, check_backend
from weft.core.errors import InputError
from weft.run.kernels.choice import Judge
from weft.run.kernels.rules import Work
from weft.run.kernels.tiles import Tiles
from weft.run.merge import merged

__all__ = ["BACKENDS", "Kernel", "Merging", "Sums", "aligned", "choose", "guarded", "make", "packed"]

_CLASSES = {
    "cpu": ("cpu", "Cpu"),
    "cudnn": ("sdpa", "Cudnn"),
    "cudnn_sparse": ("cudnn_sparse", "CudnnSparse"),
    "exact": ("exact", "Exact"),
    "fa4": ("fa4", "Fa4"),
    "flash": ("sdpa", "Flash"),
    "gather": ("sdpa", "Gather"),
    "reference": ("reference", "Reference"),
    "triton": ("gpu", "Gpu"),
}
"""Module and class of every backend, imported when it is first made."""

Sums = tuple[Tensor, Tensor]
"""(out [B, H, S, D], natural-log lse [B, H, S]); lse is float32 or better."""


class Kernel(Protocol):
    """B batch · H heads · S query rows · T key rows · D head dim.

    Rows with no active tile give 0 and lse = -inf. Backends for 16 bits return 16 bits; sums of what they
    return are made in float32.
    """

    name: str
    grouped: bool
    """Whether k and v may have fewer heads than q: query head h then reads head h // (H_q / H_kv) of them."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        scale: float,
        into: Sums | None = None,
        *,
        fresh: bool = False,
    ) -> Sums:
        """Attention over the tiles; with `into`, merged in place with what it holds of other keys.

        With `fresh`, `into` holds nothing yet and is overwritten; then its output may be in the dtype of q.
        """
        ...

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of these tiles; `done` is the final result over *all* tiles of the rows.

        Its lse is +inf where a row has no tile at all, so that each of the row's weights is exactly 0.
        """
        ...


class Merging:
    """A kernel that computes the attention over its tiles alone; a sum with others is made afterwards."""

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Sums:
        raise NotImplementedError

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        scale: float,
        into: Sums | None = None,
        *,
        fresh: bool = False,
    ) -> Sums:
        return merged(self.attend_alone(q, k, v, tiles, scale), into, fresh=fresh)


def guarded(lse: Tensor) -> Tensor:
    """Rows with no tile at all have lse = -inf; +inf makes each of their weights exactly 0."""
    return lse.masked_fill(lse == -inf, inf)


def packed(x: Tensor) -> Tensor:
    """The numbers of a row lie side by side; everything else may be anywhere."""
    return x if x.stride(-1) == 1 else x.contiguous()


def aligned(x: Tensor, size: int = 16) -> Tensor:
    """Rows in one piece, 16 bytes or a multiple of it apart, as GPU kernels load them.

    The first lies at a multiple of `size` bytes; memory itself is allocated at multiples of 256.
    """
    width = x.element_size()
    strides = (stride for stride, count in zip(x.stride()[:-1], x.shape[:-1], strict=True) if count > 1)
    begins = x.storage_offset() * width % size == 0
    if x.stride(-1) == 1 and begins and not any(stride * width % 16 for stride in strides):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def make(backend: str) -> Kernel:
    """Return a new kernel of one backend, whether or not it serves here."""
    module, name = _CLASSES[backend]
    return getattr(import_module(f"{__name__}.{module}"), name)()


def choose(
    backend: str,
    dtype: str = "float32",
    device: str = "cpu",
    work: Work | None = None,
    judge: Judge | None = None,
) -> Kernel:
    """Return the kernel of a backend by its name; auto is the fastest that serves.

    On a GPU `work` says what a call computes (its direction is ignored: both are chosen), and `judge` may
    refuse a backend that would serve.
    """
    check_backend(backend)
    if backend in ("exact", "reference"):
        return make(backend)
    if device.partition(":")[0] == "cuda" and backend != "cpu":
        from weft.run.kernels.composite import compose

        default = Work(sparse=False, backward=False, head_dim=128, dtype=dtype)
        return compose(backend, work or default, torch.device(device), judge)
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
    from weft.run.kernels.cpu import missing

    return missing()
