"""Operands: small attentions whose whole result every rank knows in float64, for parts that run many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.core.layout import Layout
from weft.doctor.part import Check, Site
from weft.run import check
from weft.run.attention import attention
from weft.run.check import TOLERANCE, Trial

GPU_BACKEND = "flash"
"""In torch, on every GPU: parts that are not about kernels do not wait for one to be compiled."""


@dataclass(frozen=True)
class Operands:
    """This rank's q, k, v, the output's gradient, and what must come of them."""

    layout: Layout
    inputs: list[Tensor]
    grad: Tensor
    expected: list[Tensor]
    """Output, dq, dk, dv in float64 on the CPU."""
    backend: str

    @staticmethod
    def drawn(site: Site, seed: int) -> Operands:
        """Draw a dense attention; ranks that draw the same seed have shards of the same one."""
        tokens, heads, head_dim = (67, 4, 16) if site.is_rehearsal else (1021, 8, 64)
        trial = Trial(
            tokens=tokens, heads=heads, kv_heads=heads, head_dim=head_dim, dtype=site.dtype, seed=seed
        )
        layout = Layout.even(trial.tokens, site.ranks)
        rows = torch.from_numpy(layout.order(site.rank))
        *inputs, grad = (x[:, :, rows].to(site.device) for x in trial.tensors())
        expected = [x[:, :, rows] for x in check.reference(trial)]
        return Operands(layout, inputs, grad, expected, "auto" if site.is_rehearsal else GPU_BACKEND)

    def attend(self, plan: str) -> Tensor:
        q, k, v = self.inputs
        return self._attention(q, k, v, plan)

    def attend_and_differentiate(self, plan: str) -> list[Tensor]:
        """Return the output, dq, dk, dv."""
        q, k, v = leaves = [x.detach().requires_grad_() for x in self.inputs]
        out = self._attention(q, k, v, plan)
        return [out.detach(), *torch.autograd.grad(out, leaves, self.grad)]

    def _attention(self, q: Tensor, k: Tensor, v: Tensor, plan: str) -> Tensor:
        return attention(q, k, v, plan=plan, tokens=self.layout, backend=self.backend)


def judged(name: str, results: Iterable[tuple[Operands, list[Tensor]]], note: str, site: Site) -> Check:
    """Judge what was found each time: outputs, and gradients where they were computed."""
    error = max(max(map(site.error, found, operands.expected)) for operands, found in results)
    numbers = {"error": error, "allowed": TOLERANCE[site.dtype]}
    status = "ok" if error <= numbers["allowed"] else "wrong"
    return Check(name=name, status=status, note=note, numbers=numbers)
