"""KnownAttention: small attentions whose result every rank has in float64, for suites that run many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.layout import Layout
from weft.doctor.suite import Check, CheckContext
from weft.run.attention import attention
from weft.run.measure import compare
from weft.run.measure.compare import TOLERANCE, Trial

GPU_BACKEND = "flash"
"""In torch, on every GPU: suites that are not about kernels must not wait for one to be compiled."""


@dataclass(frozen=True)
class KnownAttention:
    """This rank's q, k, v and output gradient, and the expected results."""

    layout: Layout
    inputs: list[Tensor]
    grad: Tensor
    expected: list[Tensor]
    """Output, dq, dk, dv in float64 on the CPU."""
    backend: str

    @staticmethod
    def drawn(ctx: CheckContext, seed: int) -> KnownAttention:
        """Draw a dense attention; ranks that draw the same seed have shards of the same one."""
        tokens, heads, head_dim = (67, 4, 16) if ctx.is_rehearsal else (1021, 8, 64)
        trial = Trial(
            tokens=tokens, heads=heads, kv_heads=heads, head_dim=head_dim, dtype=ctx.dtype, seed=seed
        )
        layout = Layout.even(trial.tokens, ctx.ranks)
        rows = torch.from_numpy(layout.order(ctx.rank))
        *inputs, grad = (x[:, :, rows].to(ctx.device) for x in trial.tensors())
        expected = [x[:, :, rows] for x in compare.reference(trial)]
        return KnownAttention(layout, inputs, grad, expected, "auto" if ctx.is_rehearsal else GPU_BACKEND)

    def attend(self, plan: str) -> Tensor:
        return self._attention(self.inputs, plan)

    def attend_and_differentiate(self, plan: str) -> list[Tensor]:
        """Return the output, dq, dk, dv."""
        leaves = [x.detach().requires_grad_() for x in self.inputs]
        out = self._attention(leaves, plan)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad)]

    def _attention(self, inputs: list[Tensor], plan: str) -> Tensor:
        q, k, v = inputs
        return attention(q, k, v, plan=plan, tokens=self.layout, backend=self.backend)


def judged(
    name: str, results: Iterable[tuple[KnownAttention, list[Tensor]]], note: str, ctx: CheckContext
) -> Check:
    """Judge the results of several runs: outputs, and gradients if they were computed."""
    error = max(max(map(ctx.error, actual, known.expected)) for known, actual in results)
    return Check.judged(name, error, TOLERANCE[ctx.dtype], note=note)
