"""Merge partial attentions by log-sum-exp, in place, in the dtype that sums are kept in."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def merge_(into: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """`into`, as (out [B, H, S, D], lse [B, H, S]), becomes the attention over the keys of both parts."""
    (out, lse), (new_out, new_lse) = into, new
    # The new part's weight is e^new / (e^old + e^new). An empty new part weighs nothing, also where both
    # are empty and the difference is inf - inf; a NaN that came from the inputs stays one.
    weight = torch.sigmoid(new_lse - lse).masked_fill_(new_lse == -torch.inf, 0.0)
    out.lerp_(new_out.to(out.dtype), weight.unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, new_lse.to(lse.dtype), out=lse)
    return into


def merged(
    new: tuple[Tensor, Tensor], into: tuple[Tensor, Tensor] | None, *, fresh: bool
) -> tuple[Tensor, Tensor]:
    """A partial attention as it is, written over `into` where that is fresh, or merged with it.

    On a GPU either is one launch.
    """
    if into is None:
        return new
    # A tensor without data (meta, FakeTensor) is of another type.
    if type(into[0]) is Tensor and into[0].is_cuda and _has_triton():
        from weft.run.kernels.triton_merge import merge_on_device

        return merge_on_device(into, new, fresh=fresh)
    if not fresh:
        return merge_(into, new)
    for target, part in zip(into, new, strict=True):
        target.copy_(part)
    return into


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
