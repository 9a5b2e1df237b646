"""The oracle: attention written out in float64 on the whole sequence, and how to cut it by a layout.

truth = Truth.of(problem, mask)
truth.check_outputs([fn(*truth.inputs(rank)) for rank in range(problem.ranks)], 1e-10)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from tests.cases import token_mask
from weft.core.indices import EMPTY
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem

# Threads of one small operation wait for each other; on a busy machine that is most of the time.
torch.set_num_threads(1)


def dense(q: Tensor, k: Tensor, v: Tensor, scale: float, allowed: Tensor | None = None) -> Tensor:
    """Softmax attention [B, H, S, D] as the textbook has it; a row that may see nothing gives 0."""
    share = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(share, 1) for x in (k, v))
    scores = q @ k.mT * scale
    if allowed is None:
        return scores.softmax(-1) @ v
    empty = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~(allowed | empty), -torch.inf)
    return scores.softmax(-1).masked_fill(~allowed, 0.0) @ v


def shard(x: Tensor, layout: Layout, rank: int, *, fill: float = torch.nan) -> Tensor:
    """A rank's rows of a whole tensor; padded rows hold what must never be read."""
    rows = x[:, :, torch.from_numpy(layout.order(rank))]
    return torch.nn.functional.pad(rows, (0, 0, 0, layout.rows(rank) - rows.shape[2]), value=fill)


def unshard(shards: Sequence[Tensor], layout: Layout) -> Tensor:
    """The sum over all copies of each token: what the gradients of a whole tensor are."""
    batch, heads, _, head_dim = shards[0].shape
    whole = shards[0].new_zeros(batch, heads, layout.size, head_dim, dtype=torch.float64)
    for rank, x in enumerate(shards):
        order = torch.from_numpy(layout.order(rank))
        whole.index_add_(2, order, x[:, :, : len(order)].double())
    return whole


@dataclass(frozen=True, eq=False)
class Truth:
    """Random q, k, v and output gradients of a problem, and what attention makes of them."""

    problem: Problem
    mask: BlockMask
    scale: float
    whole: tuple[Tensor, Tensor, Tensor]
    """q, k, v over all tokens, float64 numbers that the problem's dtype has exactly."""
    slopes: tuple[Tensor, ...]
    """By rank, the gradient of its output, with NaN in the padded rows.

    It is cut from one whole tensor, except that every copy of a replicated token has its own.
    """

    @staticmethod
    def of(problem: Problem, mask: BlockMask | None = None, *, scale: float = 0.37, seed: int = 0) -> Truth:
        random = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, problem.dtype)

        def some(heads: int, tokens: int) -> Tensor:
            shape = (problem.batch, heads, tokens, problem.head_dim)
            return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).double()

        q, kv = problem.q, problem.kv
        whole = some(problem.heads, q.size), some(problem.kv_heads, kv.size), some(problem.kv_heads, kv.size)
        slope = some(problem.heads, q.size)
        slopes, seen = [], EMPTY
        for rank in range(q.ranks):
            again = torch.from_numpy(np.isin(q.order(rank), seen.array))
            slopes.append(shard(slope, q, rank))
            slopes[rank][:, :, : len(again)][:, :, again] = some(problem.heads, int(again.sum()))
            seen = seen | q.held(rank)
        everything = BlockMask.dense(problem.heads, q.size, kv.size)
        return Truth(problem, everything if mask is None else mask, scale, whole, tuple(slopes))

    @cached_property
    def answer(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output over all tokens, and the gradients of q, k, v."""
        inputs = [x.clone().requires_grad_() for x in self.whole]
        allowed = None if self.mask.is_dense else torch.from_numpy(token_mask(self.mask))
        out = dense(*inputs, self.scale, allowed)
        slope = unshard(self.slopes, self.problem.q)
        return out.detach(), torch.autograd.grad(out, inputs, slope)

    @cached_property
    def rounding_errors(self) -> tuple[float, float]:
        """Errors of output and gradients in one process with flash attention's formulas.

        They are float32 inside, with delta made of the output. What ranks add to it is the order of sums, and
        one rounding for each copy of a token.
        """
        dtype = getattr(torch, self.problem.dtype)
        inside = torch.promote_types(dtype, torch.float32)
        group = self.problem.heads // self.problem.kv_heads
        q, *kv = (x.to(inside) for x in self.whole)
        k, v = (x.repeat_interleave(group, 1) for x in kv)
        allowed = torch.from_numpy(token_mask(self.mask))
        lse = (q @ k.mT * self.scale).masked_fill(~allowed, -torch.inf).logsumexp(-1, keepdim=True)
        p = (q @ k.mT * self.scale - lse).exp().masked_fill(~allowed, 0.0)
        out = (p @ v).to(dtype)
        slope = unshard(self.slopes, self.problem.q).to(inside)
        ds = p * (slope @ v.mT - (slope * out).sum(-1, keepdim=True)) * self.scale
        grads = [ds @ k, *(x.unflatten(1, (-1, group)).sum(2) for x in (ds.mT @ q, p.mT @ slope))]
        expected, expected_grads = self.answer
        pairs = zip(grads, expected_grads, strict=True)
        return error(out, expected), max(error(x.to(dtype), y) for x, y in pairs)

    @property
    def size(self) -> float:
        """The largest gradient, or 1: what an error of single precision is measured by."""
        return max(1.0, *(x.abs().max().item() for x in self.answer[1]))

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """A rank's q, k, v in the problem's dtype, with NaN in the padded rows."""
        dtype = getattr(torch, self.problem.dtype)
        q, kv = self.problem.q, self.problem.kv
        q_shard, *kv_shards = (
            shard(x, layout, rank).to(dtype) for x, layout in zip(self.whole, (q, kv, kv), strict=True)
        )
        return q_shard, *kv_shards

    def slope(self, rank: int) -> Tensor:
        """A rank's output gradient in the problem's dtype."""
        return self.slopes[rank].to(getattr(torch, self.problem.dtype))

    def output_error(self, outs: Sequence[Tensor]) -> float:
        """The largest difference of any rank's output from the truth; padded rows are 0 there."""
        return max(self.output_error_of(out, rank) for rank, out in enumerate(outs))

    def output_error_of(self, out: Tensor, rank: int) -> float:
        return error(out, shard(self.answer[0], self.problem.q, rank, fill=0.0))

    def gradient_error(self, grads: Sequence[Sequence[Tensor]]) -> float:
        """The largest difference of gradients by rank (dq, dk, dv), summed over copies, from the truth."""
        layouts = (self.problem.q, self.problem.kv, self.problem.kv)
        for layout, shards in zip(layouts, zip(*grads, strict=True), strict=True):
            for rank, x in enumerate(shards):
                assert x.shape[2] == layout.rows(rank)
                assert not x[:, :, layout.held(rank).size :].any(), "a padded row has a gradient"
        found = [unshard(x, layout) for x, layout in zip(zip(*grads, strict=True), layouts, strict=True)]
        return max(error(x, y) for x, y in zip(found, self.answer[1], strict=True))


def error(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference; NaN, which no tolerance allows, counts as infinite."""
    assert found.shape == expected.shape, (found.shape, expected.shape)
    if not found.numel():
        return 0.0
    return (found.double() - expected.double()).abs().nan_to_num(torch.inf).max().item()
