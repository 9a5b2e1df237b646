"""Merge partial attentions by log-sum-exp, in place, in the dtype of the sums."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from weft.run.kernels import Accumulator, Sums
from weft.run.kernels.tiles import Tiles


class MergingKernel:
    """Base of kernels that compute the attention over their tiles only; the sum is merged afterwards."""

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Sums:
        raise NotImplementedError

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, into: Accumulator | None = None
    ) -> Sums:
        return merged(self.attend_alone(q, k, v, tiles, scale), into)


def merge_(into: Sums, new: Sums) -> Sums:
    """Merge a partial attention into `into`, which becomes the attention over the keys of both."""
    (out, lse), (new_out, new_lse) = into, new
    # The weight of the new one is e^new / (e^old + e^new). If it is empty its weight is 0, also where both
    # are empty and the difference is inf - inf; a NaN that came from the inputs stays one.
    weight = torch.sigmoid(new_lse - lse).masked_fill_(new_lse == -torch.inf, 0.0)
    out.lerp_(new_out.to(out.dtype), weight.unsqueeze(-1).to(out.dtype))
    torch.logaddexp(lse, new_lse.to(lse.dtype), out=lse)
    return into


def merged(new: Sums, into: Accumulator | None) -> Sums:
    """Return `new` if `into` is None; else copy it into a fresh `into`, or merge it; one launch on a GPU."""
    if into is None:
        return new
    out, lse, fresh = into
    # A tensor without data (meta, FakeTensor) is of another type.
    if type(out) is Tensor and out.is_cuda and _has_triton():
        from weft.run.kernels.triton_merge import merge_on_device

        return merge_on_device((out, lse), new, fresh=fresh)
    if not fresh:
        return merge_((out, lse), new)
    out.copy_(new[0])
    lse.copy_(new[1])
    return out, lse


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
