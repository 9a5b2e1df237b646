"""Reference kernel: dense scores, any dtype, differentiable. All other kernels are compared with it."""

from __future__ import annotations

import torch
from torch import Tensor

from weft.run.kernels import Sums, guarded
from weft.run.kernels.merge import MergingKernel
from weft.run.kernels.tiles import Tiles


class ReferenceKernel(MergingKernel):
    """Softmax attention as written in papers, in float32 or better."""

    name = "reference"
    grouped = False

    def attend_alone(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float) -> Sums:
        q, k, v = (widen(x) for x in (q, k, v))
        scores = self._scores(q, k, tiles, scale)
        lse = torch.logsumexp(scores, dim=-1)
        out = self._weights(scores, lse) @ v
        return out, lse

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v = (widen(x) for x in (grad, q, k, v))
        out, lse = widen(done[0]), done[1]
        weights = self._weights(self._scores(q, k, tiles, scale), lse)
        slope = weights * (grad @ v.mT - (grad * out).sum(-1, keepdim=True)) * scale
        return slope @ k, slope.mT @ q, weights.mT @ grad

    def _scores(self, q: Tensor, k: Tensor, tiles: Tiles, scale: float) -> Tensor:
        scores = q @ k.mT * scale
        if tiles.token_mask is not None:
            scores = scores.masked_fill((~tiles.token_mask).to(q.device), -torch.inf)
        return scores

    def _weights(self, scores: Tensor, lse: Tensor) -> Tensor:
        return torch.exp(scores - guarded(lse).unsqueeze(-1))


def widen(x: Tensor) -> Tensor:
    """Convert x to the dtype of sums: float64 stays, everything else becomes float32."""
    return x if x.dtype in (torch.float64, torch.float32) else x.float()
