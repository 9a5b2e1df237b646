"""The adapters of the packages on a GPU that is none: no wait, no copy from the host, no operand widened."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.run.hot_path import fake_cuda
from tests.run.package_contracts import BlockSparseTensors
from weft.run.kernels import AttentionKernel
from weft.run.kernels.cudnn_sparse import CudnnSparse
from weft.run.kernels.fa4 import Fa4
from weft.run.kernels.tiles import Blocks, Tiles


class Shapes:
    """Both packages, but for the numbers."""

    BlockSparseTensorsTorch = BlockSparseTensors

    def _flash_attn_fwd(self, q: Tensor, *_: Any, **__: Any) -> tuple[Any, ...]:
        lse = torch.empty(q.shape[0], q.shape[2], q.shape[1], device="cuda")
        return torch.empty_like(q), lse, None, None, None

    def _flash_attn_bwd(self, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    def block_sparse_attention_forward(self, q: Tensor, *_: Any, **__: Any) -> dict[str, Tensor]:
        return {"o_tensor": torch.empty_like(q), "lse_tensor": torch.empty(q.shape[:3], device="cuda")}

    def block_sparse_attention_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any
    ) -> dict[str, Tensor]:
        del grad
        return {"dq_tensor": torch.empty_like(q), "dk_tensor": k.clone(), "dv_tensor": v.clone()}


def run(kernel: AttentionKernel, tiles: Tiles) -> None:
    """Forward and backward; operands are parts of larger tensors."""
    q, k, v = (
        torch.empty(2, 2, 600, 128, dtype=torch.bfloat16, device="cuda")[:, :, 600 - n :]
        for n in (tiles.q_len, tiles.kv_len, tiles.kv_len)
    )
    out, lse = torch.empty(q.shape, device="cuda"), torch.empty(q.shape[:3], device="cuda")
    kernel.attend(q, k, v, tiles, 0.1)
    kernel.attend_backward(q, q, k, v, (out, lse), tiles, 0.1)


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize(("make", "blocks"), [(Fa4, (256, 128)), (CudnnSparse, (128, 128))])
def test_a_warm_call_neither_waits_nor_copies(make: Any, blocks: tuple[int, int], arch: str) -> None:
    shape = 2, -(-591 // blocks[0]), -(-555 // blocks[1])
    active = np.random.default_rng(0).random(shape) < 0.5
    kernel, tiles = make(Shapes(), arch), Tiles(active, *blocks, 591, 555)
    with fake_cuda() as seen:
        run(kernel, tiles)
        assert seen.copies  # the lists, once
        seen.clear()
        run(kernel, tiles)
        assert seen.names
        assert not seen.faults


@pytest.mark.parametrize("make", [Fa4, CudnnSparse])
def test_tiles_that_were_chosen_on_the_device_are_never_looked_at(make: Any) -> None:
    with fake_cuda() as seen:
        active = torch.zeros(2, 5, 5, dtype=torch.bool, device="cuda")
        tiles = Tiles(None, 128, 128, 591, 555, listed=Blocks.of(active))
        run(make(Shapes(), "sm_90"), tiles)
        assert not seen.faults


def test_dense_tiles_go_as_they_are() -> None:
    with fake_cuda() as seen:
        for _ in range(2):
            run(Fa4(Shapes(), "sm_100"), Tiles(None, 591, 555, 591, 555))
        assert not seen.faults
