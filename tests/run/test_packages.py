"""The adapters of flash-attn-4 and of cuDNN's block-sparse attention, over stand-ins of the packages."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.cases import Case, kinds
from tests.run.cuda_contracts import ContractError
from tests.run.dense import error
from tests.run.package_contracts import CudnnBlockSparse, FlashAttention4
from tests.run.test_backends import check
from weft.core.errors import InputError, MissingError
from weft.core.install import install_command
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.run.kernels import AttentionKernel, make
from weft.run.kernels.composite import Composite
from weft.run.kernels.cudnn_sparse import CudnnSparse
from weft.run.kernels.fa4 import Fa4
from weft.run.kernels.lists import padded_lists
from weft.run.kernels.parity_sample import ParitySample, compare_with_reference
from weft.run.kernels.rules import KernelSpec
from weft.run.kernels.tiles import Tiles

CPU = torch.device("cpu")


def fa4(arch: str) -> Fa4:
    return Fa4(FlashAttention4(arch), arch)


def cudnn(arch: str) -> CudnnSparse:
    return CudnnSparse(CudnnBlockSparse(arch), arch)


@dataclass(frozen=True)
class Setting:
    """Kernels of the forward and the backward of sparse tiles, and what they take."""

    arch: str
    forward: Callable[[str], AttentionKernel]
    backward: Callable[[str], AttentionKernel]
    blocks: tuple[int, int]
    head_dim: int
    heads: tuple[int, int] = (2, 2)
    dtype: str = "bfloat16"

    def __str__(self) -> str:
        names = f"{self.forward.__name__}-{self.backward.__name__}"
        return f"{self.arch}-{names}-{self.blocks}-{self.head_dim}"

    def kernel(self) -> Composite:
        dense = fa4(self.arch)
        return Composite((dense, dense), (self.forward(self.arch), self.backward(self.arch)))


SETTINGS = (
    Setting("sm_90", cudnn, cudnn, (64, 64), 128),
    Setting("sm_90", cudnn, cudnn, (128, 128), 128),
    Setting("sm_90", cudnn, fa4, (128, 128), 64, (4, 2)),
    Setting("sm_90", fa4, fa4, (64, 128), 128, (6, 3), "float16"),
    Setting("sm_100", cudnn, cudnn, (64, 64), 128),
    Setting("sm_100", cudnn, cudnn, (128, 128), 64),
    Setting("sm_100", cudnn, fa4, (128, 128), 96, (4, 1), "float16"),
    Setting("sm_100", fa4, fa4, (256, 128), 64, (4, 2)),
)


def case_of(name: str, setting: Setting, number: int) -> Case:
    """A sparse mask of odd size, with an empty row of blocks, on four ranks."""
    block_q, block_k = setting.blocks
    heads, kv_heads = setting.heads
    tokens = 3 * block_q + 1 + 10 * number % block_q
    layout = Layout.even(tokens, 4)
    problem = Problem(
        batch=1 + number % 2,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=setting.head_dim,
        q=layout,
        kv=layout,
        dtype=setting.dtype,
    )
    tiles = np.random.default_rng(number).random((heads, -(-tokens // block_q), -(-tokens // block_k))) < 0.5
    tiles[0, 1] = False
    mask = BlockMask.from_tiles(tiles, q_len=tokens, kv_len=tokens, block_q=block_q, block_k=block_k)
    return Case(problem, mask, name)


NAMES = kinds(4)


@pytest.mark.parametrize(("number", "name"), list(enumerate(NAMES)))
def test_every_strategy_over_the_contracts_of_the_packages(number: int, name: str) -> None:
    setting = SETTINGS[number % len(SETTINGS)]
    check(case_of(name, setting, number), setting.kernel())


@pytest.mark.soak
@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_with_every_kernel(name: str, setting: Setting) -> None:
    for number in range(2):
        check(case_of(name, setting, number), setting.kernel())


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_adapters_pass_the_parity_test(setting: Setting, backward: bool) -> None:
    group = setting.heads[0] // setting.heads[1]
    work = KernelSpec(True, backward, setting.head_dim, setting.dtype, *setting.blocks, group=group)
    kernel = (setting.backward if backward else setting.forward)(setting.arch)
    assert compare_with_reference(kernel, work, CPU) == ""


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
@pytest.mark.parametrize("backward", [False, True])
def test_dense_attention_passes_the_parity_test(arch: str, backward: bool) -> None:
    assert compare_with_reference(fa4(arch), KernelSpec(False, backward, 64, "float16", group=2), CPU) == ""


# Lists in another order, and a ragged end that is not told of, are silently wrong: the stand-ins show it.


def spoil(tiles: Tiles, change: Callable[[Tensor], Tensor]) -> None:
    """Change the lists that the next call reads."""
    lists = padded_lists(tiles, CPU)
    object.__setattr__(lists, "index", change(lists.index))


def test_descending_lists_would_be_wrong() -> None:
    work = KernelSpec(True, False, 64, block_q=128, block_k=128)
    sample = ParitySample.of(work)
    q, k, v = (x.bfloat16() for x in (sample.q, sample.k, sample.v))
    active = np.ones_like(sample.tiles.active)
    active[0, 0, 0] = False

    def out(order: Callable[[Tensor], Tensor]) -> Tensor:
        tiles = replace(sample.tiles, active=active, _made={})
        spoil(tiles, order)
        return fa4("sm_90").attend(q, k, v, tiles, 0.1)[0][:, 1]

    right, wrong = out(lambda x: x), out(lambda x: x.flip(-1))
    assert error(right, wrong) > 0.03


def test_a_ragged_end_is_told() -> None:
    work = KernelSpec(True, False, 128, block_q=128, block_k=128)
    package = CudnnBlockSparse("sm_90")
    real = package.block_sparse_attention_forward
    assert compare_with_reference(CudnnSparse(package, "sm_90"), work, CPU) == ""
    package.block_sparse_attention_forward = lambda *x, **y: real(*x, **(y | {"block_sizes": None}))
    assert "is off by" in compare_with_reference(CudnnSparse(package, "sm_90"), work, CPU)


# Operands that a kernel would not take as they lie are copied, others are not.


def operand(heads: int, rows: int, dim: int, *, part: str = "") -> Tensor:
    random = torch.Generator().manual_seed(heads + rows)
    extra = {"tokens": (0, 3), "heads": (2, 0)}.get(part, (0, 0))
    x = torch.randn(1, heads + extra[0], rows + extra[1], dim, generator=random).bfloat16()
    return x[:, extra[0] :, extra[1] :]


@pytest.mark.parametrize("part", ["tokens", "heads"])
@pytest.mark.parametrize(
    ("arch", "block", "dim"), [("sm_90", 64, 96), ("sm_100", 64, 128), ("sm_100", 128, 64)]
)
def test_parts_of_larger_tensors_are_taken(arch: str, block: int, dim: int, part: str) -> None:
    tiles = Tiles(np.tri(3, dtype=bool)[None].repeat(2, 0), block, block, 3 * block - 7, 3 * block - 7)
    q, k, v = (operand(2, tiles.q_len, dim, part=part) for _ in range(3))
    whole = [x.clone(memory_format=torch.contiguous_format) for x in (q, k, v)]
    out, lse = cudnn(arch).attend(q, k, v, tiles, 0.1)
    assert error(out, cudnn(arch).attend(*whole, tiles, 0.1)[0]) == 0.0
    if (arch, block) != ("sm_90", 64):
        final = out.float(), lse
        found = cudnn(arch).attend_backward(q, q, k, v, final, tiles, 0.1)
        expected = cudnn(arch).attend_backward(whole[0], *whole, final, tiles, 0.1)
        assert max(error(x, y) for x, y in zip(found, expected, strict=True)) == 0.0


@pytest.mark.parametrize("kernel", [fa4("sm_90"), fa4("sm_100")])
def test_flash_attention_reads_operands_where_they_lie(kernel: Fa4, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (operand(2, 300, 64, part="tokens") for _ in range(3))
    seen: list[int] = []
    real = kernel._package._flash_attn_fwd
    monkeypatch.setattr(
        kernel._package,
        "_flash_attn_fwd",
        lambda *x, **y: (seen.extend(each.data_ptr() for each in x), real(*x, **y))[1],
    )
    kernel.attend(q, k, v, Tiles(None, 300, 300, 300, 300), 0.1)
    assert seen == [x.data_ptr() for x in (q, k, v)]


# What a package cannot do is refused before it is called.

SPARSE = Tiles(np.tri(3, dtype=bool)[None], 64, 64, 192, 192)
DENSE = Tiles(None, 192, 192, 192, 192)


@pytest.mark.parametrize(
    ("kernel", "dim", "dtype", "tiles", "scale", "why"),
    [
        (fa4("sm_80"), 64, torch.bfloat16, DENSE, 0.1, "sm_90 and sm_100"),
        (fa4("sm_90"), 64, torch.float32, DENSE, 0.1, "not float32"),
        (fa4("sm_100"), 192, torch.bfloat16, DENSE, 0.1, "up to 128, or 256"),
        (
            fa4("sm_100"),
            64,
            torch.bfloat16,
            SPARSE,
            0.1,
            "256 queries by multiples of 128 keys",
        ),
        (fa4("sm_90"), 64, torch.bfloat16, DENSE, 0.0, "takes a scale above 0"),
        (cudnn("sm_90"), 80, torch.bfloat16, SPARSE, 0.1, "has head dims"),
        (cudnn("sm_100"), 128, torch.float16, SPARSE, 0.1, "computes bfloat16, not float16"),
        (
            cudnn("sm_90"),
            128,
            torch.bfloat16,
            DENSE,
            0.1,
            "it computes sparse tiles",
        ),
        (cudnn("sm_90"), 128, torch.bfloat16, replace(SPARSE, block_q=32), 0.1, "64 by 64 or 128 by 128"),
    ],
)
def test_what_a_package_cannot_do_is_refused(
    kernel: Any, dim: int, dtype: torch.dtype, tiles: Tiles, scale: float, why: str
) -> None:
    q = torch.zeros(1, 1, 192, dim, dtype=dtype)
    with pytest.raises(InputError, match=why):
        kernel.attend(q, q, q, tiles, scale)
    assert kernel._package.calls == []


def test_heads_that_share_keys_have_no_backward_in_cudnn() -> None:
    q, k = torch.zeros(1, 2, 192, 128).bfloat16(), torch.zeros(1, 1, 192, 128).bfloat16()
    kernel = cudnn("sm_90")
    with pytest.raises(InputError, match="each key/value head serves 2 query heads"):
        kernel.attend_backward(q, q, k, k, (q, torch.zeros(1, 2, 192)), SPARSE, 0.1)
    assert kernel._package.calls == []


@pytest.mark.parametrize(("backend", "module"), [("fa4", "flash_attn"), ("cudnn_sparse", "cudnn")])
def test_a_package_that_is_missing_is_named_with_its_extra(
    backend: str, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    extra = {"fa4": "fa4", "cudnn_sparse": "cudnn"}[backend]
    with pytest.raises(
        MissingError, match=rf"backend='{backend}' needs .*{re.escape(install_command(extra))}"
    ):
        make(backend)


@pytest.mark.parametrize(
    ("arch", "change", "rule"),
    [
        ("sm_90", {"q2k_block_nums": None}, "always passes counts"),
        ("sm_90", {"allow_empty_block_nums": False}, "counts of 0"),
        ("sm_100", {"pack_gqa": None}, "packed heads"),
    ],
)
def test_a_stand_in_raises_where_cudnn_would(arch: str, change: dict[str, Any], rule: str) -> None:
    package = CudnnBlockSparse(arch)
    real = package.block_sparse_attention_forward
    package.block_sparse_attention_forward = lambda *x, **y: real(*x, **(y | change))
    with pytest.raises(ContractError, match=rule):
        compare_with_reference(
            CudnnSparse(package, arch), KernelSpec(True, False, 128, block_q=128, block_k=128), CPU
        )
