"""The gradients of kernels, against differences and against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from weft.run.kernels import AttentionKernel, choose, guarded
from weft.run.kernels.tiles import Blocks, Tiles

SIZES = 4, 8, 11, 19


class Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, kernel: AttentionKernel) -> Tensor:
        out, lse = kernel.attend(q, k, v, tiles, 0.4)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = tiles, kernel
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, out, lse = ctx.saved_tensors
        tiles, kernel = ctx.options
        grads = kernel.attend_backward(grad, q, k, v, (out, guarded(lse)), tiles, 0.4)
        return *(g.to(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None, None


def inputs(dtype: torch.dtype) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = [(1, 2, 11, 3), (1, 2, 19, 3), (1, 2, 19, 3)]
    return [torch.randn(s, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def some_tiles() -> Tiles:
    active = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(2)) < 0.5
    active[0, 1] = False
    return Tiles(None, *SIZES, listed=Blocks.of(active))


@pytest.mark.parametrize("backend", ["reference", "exact"])
@pytest.mark.parametrize("tiles", [Tiles(None, *SIZES), some_tiles()], ids=["dense", "sparse"])
def test_gradcheck_finds_the_gradients_right(backend, tiles):
    def out(q, k, v):
        return Attend.apply(q, k, v, tiles, choose(backend))

    assert torch.autograd.gradcheck(out, inputs(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_gives_the_gradients_of_the_reference(dtype):
    found = []
    for backend in ("cpu", "reference"):
        leaves = inputs(dtype)
        Attend.apply(*leaves, some_tiles(), choose(backend)).square().sum().backward()
        found.append([x.grad for x in leaves])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs)
