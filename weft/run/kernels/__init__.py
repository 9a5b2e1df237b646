"""Partial attention with log-sum-exp, forward and backward, over the active tiles of a mask.

One signature, several implementations; `choose` gives the one asked for or says why it cannot serve.
"""

from __future__ import annotations

from math import inf
from typing import Protocol

from torch import Tensor

from weft.core.errors import InputError, MissingError
from weft.run.kernels.tiles import Tiles

Sums = tuple[Tensor, Tensor]
"""(out [B, H, S, D], natural-log lse [B, H, S]), float32 or better."""


class Kernel(Protocol):
    """B batch · H heads · S query rows · T key rows · D head dim.

    Outputs are float32 or better, whatever the inputs are, so that partial results merge without
    loss. Rows with no active tile give 0 and lse = -inf.
    """

    name: str

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
        """(dq, dk, dv) of these tiles; `done` is the final result over *all* tiles of the rows."""
        ...


def guarded(lse: Tensor) -> Tensor:
    """Rows with no tile at all have lse = -inf; +inf makes each of their weights exactly 0."""
    return lse.masked_fill(lse == -inf, inf)


def packed(x: Tensor) -> Tensor:
    """The numbers of a row lie side by side; everything else may be anywhere."""
    return x if x.stride(-1) == 1 else x.contiguous()


BACKENDS = ("auto", "cpu", "triton", "exact", "reference")


def choose(backend: str, dtype: str = "float32", device: str = "cpu") -> Kernel:
    """The kernel by its name; auto is the fastest that serves this dtype on this device."""
    if backend not in BACKENDS:
        raise InputError(f"backend={backend!r} is unknown.", hint=f"Use one of {', '.join(BACKENDS)}.")
    if backend == "auto":
        backend = next(name for name in ("cpu", "exact") if not cannot(name, dtype, device))
    if why := cannot(backend, dtype, device):
        raise InputError(
            f"backend={backend!r} cannot serve: {why}", hint="backend='auto' takes one that can."
        )
    if backend == "cpu":
        from weft.run.kernels.cpu import Cpu

        return Cpu()
    if backend == "triton":
        from weft.run.kernels.gpu import Gpu

        return Gpu()
    if backend == "exact":
        from weft.run.kernels.exact import Exact

        return Exact()
    from weft.run.kernels.reference import Reference

    return Reference()


def cannot(backend: str, dtype: str, device: str) -> str:
    """Why an implementation does not serve a dtype on a device here; empty if it does."""
    kind = device.partition(":")[0]
    if backend == "cpu":
        if kind != "cpu" or dtype == "float64":
            return f"it computes float32, bfloat16 and float16 on the CPU, not {dtype} on {kind}."
        from weft.run.kernels.cpu import missing

        return missing()
    if backend == "triton":
        if kind != "cuda" or dtype not in ("bfloat16", "float16"):
            return f"it computes bfloat16 and float16 on a GPU, not {dtype} on {kind}."
        try:
            import triton  # noqa: F401  # pyright: ignore[reportUnusedImport]
        except ImportError as error:
            raise MissingError("It needs triton.", hint="Add it with: pip install triton==3.7.1") from error
    return ""
