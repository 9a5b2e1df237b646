"""Triton: merge a partial attention into a running sum, or write it over a fresh one, in one launch.

Importing this module imports triton.
"""
# ruff: noqa: PLR0913 - a launch has as many arguments as it has

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from weft.run.kernels.triton_attention import on_device
from weft.run.kernels.triton_forward import INFINITY, corner

ROWS = 16


@triton.jit
def merge_rows(
    out, lse, new_out, new_lse,
    out_strides, lse_strides, new_out_strides, new_lse_strides,
    heads, q_len,
    D: tl.constexpr, WIDTH: tl.constexpr, FRESH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """ROWS rows of one head; WIDTH is the power of two that holds their D numbers."""
    top = tl.program_id(0) * ROWS
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows, dims = tl.arange(0, ROWS), tl.arange(0, WIDTH)
    inside = top + rows < q_len
    known = inside[:, None] & (dims < D)[None, :]
    out_at = corner(out, out_strides, batch, head, top) + rows[:, None] * out_strides[2] + dims[None, :]
    new_at = corner(new_out, new_out_strides, batch, head, top) + rows[:, None] * new_out_strides[2]
    lse_at = corner(lse, lse_strides, batch, head, top) + rows * lse_strides[2]
    part_at = corner(new_lse, new_lse_strides, batch, head, top) + rows * new_lse_strides[2]
    sums = tl.load(new_at + dims[None, :], mask=known, other=0.0).to(tl.float32)
    total = tl.load(part_at, mask=inside, other=-INFINITY)
    if not FRESH:
        old_out = tl.load(out_at, mask=known, other=0.0).to(tl.float32)
        old = tl.load(lse_at, mask=inside, other=-INFINITY)
        # An empty part weighs nothing, also where both are empty and the difference is inf - inf.
        weight = tl.where(total == -INFINITY, 0.0, 1.0 / (1.0 + tl.exp(old - total)))
        sums = old_out + weight[:, None] * (sums - old_out)
        peak = tl.maximum(old, total)
        both = peak + tl.log(tl.exp(old - peak) + tl.exp(total - peak))
        total = tl.where(peak == -INFINITY, -INFINITY, both)
    tl.store(out_at, sums.to(out.dtype.element_ty), mask=known)
    tl.store(lse_at, total, mask=inside)


def merge_on_device(
    into: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor], *, fresh: bool
) -> tuple[Tensor, Tensor]:
    """See `weft.run.kernels.merge.merged`."""
    out, lse, new_out, new_lse = *into, *new
    batch, heads, rows, head_dim = out.shape
    if not out.numel():
        return into
    strides = tuple(x.stride()[:3] for x in (out, lse, new_out, new_lse))
    constants = {"D": head_dim, "WIDTH": triton.next_power_of_2(head_dim), "FRESH": fresh, "ROWS": ROWS}
    kernel: Any = merge_rows
    with on_device(out.device):
        kernel[-(-rows // ROWS), batch * heads](
            out, lse, new_out, new_lse, *strides, heads, rows, **constants
        )
    return into
