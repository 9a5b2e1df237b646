"""Derivatives of an attention: backward, forward mode and `torch.func`, and an error for what has none.

The tangent of O = P V, whose scores S = scale · Q Kᵀ have the tangent Ṡ, is P∘(Ṡ - rowsum(P∘Ṡ)) V + P V̇. The
second term is an attention. The first is part of a backward: queries [Q, 0], keys [K, V] and values [K, K̇] of
twice the head dim have the same P, and for the output gradient [Q̇, Q] the gradient of the queries is
scale · P∘(Q̇ Kᵀ + Q K̇ᵀ - delta) [K, V], whose second half it is. So every schedule, mask and kernel serves.
"""

# torch's own types are incomplete here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.core.layout import Layout
from weft.core.schedule import Schedule
from weft.run.execute import Executor
from weft.run.switch import all_gather
from weft.run.transforms import FIRST_ONLY, check_unmapped, refused, saved_tensors, unmapped


@dataclass(frozen=True, eq=False)
class Derived:
    """One attention call that may be differentiated."""

    executor: Executor
    scale: float
    keep: bool
    """Whether a backward may follow."""
    mesh: Any = None
    wide: Callable[[], Executor] | None = None
    """Return the executor for twice the head dim; None without forward mode."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _Attention.apply(q, k, v, self)[0]  # pyright: ignore[reportOptionalSubscript]

    def tangent(self, q: Tensor, k: Tensor, v: Tensor, *tangents: Tensor | None) -> Tensor:
        """All ranks run the same, whichever tangents are zero."""
        assert self.wide is not None
        pairs = zip((q, k, v), tangents, strict=True)
        dq, dk, dv = (torch.zeros_like(x) if dx is None else dx for x, dx in pairs)
        wide, shared = self.wide(), _shared(self.executor.schedule.attention[0].q, self.executor.comm.rank)
        inputs = torch.cat((q, torch.zeros_like(q)), -1), torch.cat((k, v), -1), torch.cat((k, dk), -1)
        grad = torch.cat((dq, q), -1)
        if shared is not None:  # one rank counts for a token that several hold
            grad = grad.index_fill(2, shared.again.to(q.device), 0.0)
        out, saved = wide.forward(*inputs, self.scale, keep=True)
        wide_dq, _, _ = wide.backward(grad, inputs, out if wide.reads_output else None, saved, self.scale)
        first = wide_dq[..., q.shape[-1] :]
        if shared is not None:
            first = shared.summed(first, self.mesh)
        return first + self.executor.forward(q, k, dv, self.scale, keep=False)[0]


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, call: Derived) -> tuple[Tensor, ...]:
        out, saved = call.executor.forward(q, k, v, call.scale, keep=call.keep)
        return out, *saved

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        *qkv, ctx.call = inputs
        ctx.unused = (None,) * (len(output) - 1)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        # Where outputs are not computed at home, the backward reads those; then the result may be freed.
        ctx.save_for_backward(*qkv, *(output if ctx.call.executor.reads_output else output[1:]))
        if ctx.call.wide is not None:
            ctx.save_for_forward(*qkv)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Any, ...]:  # pyright: ignore
        saved = saved_tensors(ctx)
        if grad is None:  # all ranks run the same, whichever gradients are zero
            grad = torch.zeros_like(saved[0])
        check_unmapped("The gradient of weft.attention", grad)
        return *_Gradient.apply(ctx.call.executor, ctx.call.scale, grad, *saved), None  # pyright: ignore

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor | None) -> tuple[Any, ...]:  # pyright: ignore
        return _Tangent.apply(ctx.call, *ctx.saved_tensors, *tangents[:3]), *ctx.unused

    vmap = unmapped("weft.attention")


class _Gradient(torch.autograd.Function):
    """(dq, dk, dv), from q, k, v and what the forward saved; it has no derivative of its own."""

    @staticmethod
    def forward(executor: Executor, scale: float, grad: Tensor, *saved: Any) -> tuple[Tensor, ...]:
        q, k, v, *rest = saved
        out = rest.pop(0) if executor.reads_output else None
        return executor.backward(grad, (q, k, v), out, rest, scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = refused("weft.attention has no second derivative, which the gradient of its gradient needs.")
    jvp = refused(
        "weft.attention has no second derivative, which the tangent of its gradient needs.",
        f"Call backward outside of forward_ad.dual_level(). {FIRST_ONLY}",
    )
    vmap = unmapped("The gradient of weft.attention")


class _Tangent(torch.autograd.Function):
    @staticmethod
    def forward(call: Derived, *tensors: Any) -> Tensor:
        return call.tangent(*tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    backward = jvp = refused(
        "weft.attention has no second derivative, which the gradient of its tangent needs.",
        "Detach the tangent, as sCM, MeanFlow and rCM do: the output's target is made of tangent.detach().",
    )
    vmap = unmapped("The tangent of weft.attention")


@lru_cache(1024)
def widened(schedule: Schedule) -> Schedule:
    """The same for twice the head dim, of which no piece depends."""
    problem, _ = schedule.attention
    return replace(schedule, problem=replace(problem, head_dim=2 * problem.head_dim))


@dataclass(frozen=True, eq=False)
class _Shared:
    """A rank's rows of the tokens that several ranks hold: gradients of their copies are partial."""

    count: int
    """Tokens on all ranks."""
    rows: Tensor
    places: Tensor
    """Of the rows among these tokens."""
    again: Tensor
    """Rows that an earlier rank holds too."""

    def summed(self, x: Tensor, mesh: Any) -> Tensor:
        rows, places = self.rows.to(x.device), self.places.to(x.device)
        own = x.new_zeros(*x.shape[:2], self.count, x.shape[3]).index_copy(2, places, x.index_select(2, rows))
        return x.index_copy(
            2, rows, all_gather(own, mesh=mesh, stage="tangents").sum(0).index_select(2, places)
        )


@lru_cache(256)
def _shared(layout: Layout, rank: int) -> _Shared | None:
    orders = [layout.order(each) for each in range(layout.ranks)]
    copies = np.bincount(np.concatenate(orders), minlength=layout.size)
    tokens, own = np.flatnonzero(copies > 1), orders[rank]
    if not tokens.size:
        return None
    rows = np.flatnonzero(copies[own] > 1)
    again = np.flatnonzero(np.isin(own, np.concatenate([own[:0], *orders[:rank]])))
    places = np.searchsorted(tokens, own[rows])
    return _Shared(len(tokens), *(torch.from_numpy(x) for x in (rows, places, again)))
