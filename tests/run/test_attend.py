"""The differentiable call over the kernels."""

from __future__ import annotations

import pytest
import torch

from weft.core.errors import InputError
from weft.run.kernels.attend import attend
from weft.run.kernels.tiles import Blocks

SIZES = {"scale": 0.4, "block_q": 4, "block_k": 8}


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    shapes = [(1, 2, 11, 3), (1, 2, 19, 3), (1, 2, 19, 3)]
    return [torch.randn(s, generator=draw, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def some_blocks() -> Blocks:
    active = torch.rand(2, 3, 3, generator=torch.Generator().manual_seed(2)) < 0.5
    active[0, 1] = False
    return Blocks.of(active)


@pytest.mark.parametrize("backend", ["reference", "exact"])
@pytest.mark.parametrize("blocks", [None, some_blocks()], ids=["dense", "sparse"])
def test_gradcheck_finds_the_gradients_right(backend, blocks):
    def out(q, k, v):
        return attend(q, k, v, blocks, **SIZES, backend=backend)[0]

    assert torch.autograd.gradcheck(out, inputs(torch.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_compiled_kernel_gives_the_gradients_of_the_reference(dtype):
    found = []
    for backend in ("cpu", "reference"):
        leaves = inputs(dtype)
        attend(*leaves, some_blocks(), **SIZES, backend=backend)[0].square().sum().backward()
        found.append([x.grad for x in leaves])
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs)


def test_blocks_of_another_size_are_refused():
    with pytest.raises(InputError, match=r"must have \(2, 6, 3\).*got \(2, 3, 3\)"):
        attend(*inputs(torch.float32), some_blocks(), scale=1.0, block_q=2, block_k=8)
