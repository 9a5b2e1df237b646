"""Whole executors over stand-ins for CUDA's attention operators, forward and backward, against the truth."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.adversary import run_adversary
from tests.cases import Case, cases, kinds
from tests.run.cuda_contracts import ContractError, CudaOps
from tests.run.dense import Truth, error
from tests.run.hot_path import fake_cuda
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.run.execute import Executor
from weft.run.kernels import AttentionKernel
from weft.run.kernels.composite import Composite
from weft.run.kernels.exact import Exact
from weft.run.kernels.sdpa import Cudnn, Flash, GatheredFlash
from weft.run.kernels.tiles import Tiles

# Largest error over the largest number: partial results, and what is summed of them, are rounded to 8 bits.
TOLERANCE = 0.02
DENSE = {"flash": Flash, "cudnn": Cudnn}


def kernel_of(dense: str, ops: CudaOps) -> AttentionKernel:
    """Dense tiles by one kernel, sparse ones by gathering."""
    own, gather = DENSE[dense](ops), GatheredFlash(ops)
    return Composite((own, own), (gather, gather))


def check(case: Case, kernel: AttentionKernel, tolerance: float = TOLERANCE) -> None:
    """Forward and backward on all ranks."""
    truth = Truth.of(case.problem, case.mask, scale=case.problem.head_dim**-0.5)

    def job(comm: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
        executor, inputs = Executor(case.schedule, comm, kernel), truth.inputs(comm.rank)
        out, saved = executor.forward(*inputs, truth.scale, keep=True)
        executor.forward(*inputs, truth.scale, keep=False)
        return out, executor.backward(truth.slope(comm.rank), inputs, out, saved, truth.scale)

    results = run_adversary(case.problem.ranks, job)
    largest = max(1.0, truth.answer[0].abs().max().item())
    assert truth.output_error([out for out, _ in results]) < tolerance * largest
    assert truth.gradient_error([grads for _, grads in results]) < tolerance * truth.size


def odd_case(name: str, number: int) -> Case:
    """Sizes that nothing divides; every second one is sparse, two of three have heads that share keys."""
    ranks, tokens = 4, 197 + number
    heads, shared = ((6, 3), (5, 5), (4, 1))[number % 3]
    layout = Layout.even(tokens, ranks, prefix=7 if number % 4 == 0 else 0)
    problem = Problem(
        batch=1 + number % 2,
        heads=heads,
        kv_heads=shared,
        head_dim=(8, 24, 20, 40)[number % 4],
        q=layout,
        kv=layout,
        dtype="bfloat16",
    )
    mask = BlockMask.dense(heads, tokens)
    if number % 2:
        tiles = np.random.default_rng(number).random((heads, -(-tokens // 16), -(-tokens // 32))) < 0.4
        tiles[:, 1] = False
        mask = BlockMask.from_tiles(tiles, q_len=tokens, kv_len=tokens, block_q=16, block_k=32)
    return Case(problem, mask, name)


@pytest.mark.parametrize(("number", "name"), list(enumerate(kinds(4))))
def test_every_strategy_in_16_bits_over_the_contracts_of_cuda(name: str, number: int) -> None:
    ops = CudaOps()
    check(odd_case(name, number), kernel_of("flash", ops))
    assert {"flash", "flash backward"} <= ops.calls.keys()


@settings(max_examples=12)
@given(case=cases(61, dtype="bfloat16"), head_dim=st.sampled_from((4, 8, 72, 200)))
def test_any_schedule_by_flash_attention(case: Case, head_dim: int) -> None:
    small = replace(case, problem=replace(case.problem, head_dim=head_dim))
    check(small, kernel_of("flash", CudaOps("sm_86")))


@settings(max_examples=12)
@given(case=cases(61, dtype="float16"), head_dim=st.sampled_from((8, 16, 128)))
def test_any_schedule_by_cudnn(case: Case, head_dim: int) -> None:
    small = replace(case, problem=replace(case.problem, head_dim=head_dim))
    check(small, kernel_of("cudnn", CudaOps()))


@settings(max_examples=12)
@given(case=cases(61, dtype="float32"))
def test_any_schedule_by_memory_efficient_attention_in_float32(case: Case) -> None:
    check(case, Exact(CudaOps()), 1e-5)


@pytest.mark.soak
@settings(max_examples=300)
@given(case=cases(200, dtype="bfloat16"), dense=st.sampled_from(tuple(DENSE)), eights=st.integers(1, 16))
def test_many_schedules_over_the_contracts_of_cuda(case: Case, dense: str, eights: int) -> None:
    wide = replace(case, problem=replace(case.problem, head_dim=8 * eights))
    check(wide, kernel_of(dense, CudaOps("sm_120")))


def operands(*heads: int, rows: int = 37, head_dim: int = 16) -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(2, each, rows, head_dim, generator=random).bfloat16() for each in heads]


def dense_tiles(rows: int = 37, keys: int = 37) -> Tiles:
    return Tiles(None, rows, keys, rows, keys)


@pytest.mark.parametrize("make", [Flash, Cudnn])
def test_results_stay_in_16_bits_and_keys_are_not_copied_for_heads_that_share_them(
    make: Callable[[Any], AttentionKernel],
) -> None:
    q, k, v, grad = operands(6, 2, 2, 6)
    kernel = make(CudaOps())
    out, lse = kernel.attend(q, k, v, dense_tiles(), 0.3)
    dq, dk, dv = kernel.attend_backward(grad, q, k, v, (out, lse), dense_tiles(), 0.3)
    assert {x.dtype for x in (out, dq, dk, dv)} == {torch.bfloat16} and lse.dtype == torch.float32
    assert kernel.grouped and dk.shape == dv.shape == k.shape
    copies = [x.repeat_interleave(3, 1) for x in (k, v)]
    alike, _ = kernel.attend(q, *copies, dense_tiles(), 0.3)
    assert error(out, alike) == 0.0


@pytest.mark.parametrize("make", [Flash, Cudnn])
def test_misaligned_operands_are_copied(make: Callable[[Any], AttentionKernel]) -> None:
    q, k, v = operands(2, 2, 2)
    expected, _ = make(CudaOps()).attend(q, k, v, dense_tiles(), 0.3)
    odd = [torch.cat([x[..., :1], x], -1)[..., 1:] for x in (q, k, v)]
    assert any(x.storage_offset() % 8 for x in odd)
    found, _ = make(CudaOps()).attend(*odd, dense_tiles(), 0.3)
    assert error(found, expected) == 0.0


def test_one_key_goes_to_flash_attention_which_takes_it() -> None:
    ops = CudaOps()
    q, grad = operands(2, 2)
    k, v = operands(2, 2, rows=1)
    out, lse = Cudnn(ops).attend(q, k, v, dense_tiles(37, 1), 0.3)
    Cudnn(ops).attend_backward(grad, q, k, v, (out, lse), dense_tiles(37, 1), 0.3)
    assert ops.calls == {"flash": 1, "flash backward": 1}


@pytest.mark.parametrize(
    ("rule", "broken"),
    {
        "multiple of 8, at most 256": {"head_dim": 264},
        "strides of 16 bytes": {"head_dim": 12},
        "fp16 or all in bf16": {"dtype": torch.float32},
        "pointers of 16 bytes": {"offset": 1},
        "heads of k and v must divide": {"heads": 4},
    }.items(),
)
def test_a_stand_in_raises_where_cuda_would(rule: str, broken: dict[str, Any]) -> None:
    q, k, v = operands(6, broken.get("heads", 3), broken.get("heads", 3), head_dim=broken.get("head_dim", 16))
    q, k, v = (x.to(broken.get("dtype", x.dtype)) for x in (q, k, v))
    if offset := broken.get("offset"):
        q = torch.empty(q.numel() + offset, dtype=q.dtype)[offset:].view(q.shape)
    with pytest.raises(ContractError, match=rule):
        CudaOps()._scaled_dot_product_flash_attention(q, k, v, 0.0, False, False, scale=0.3)


@pytest.mark.parametrize("name", [name for name in dir(CudaOps) if name.startswith("_scaled")])
def test_a_stand_in_is_called_as_the_operator_is(name: str) -> None:
    schema = getattr(torch.ops.aten, name).default._schema
    ours = list(inspect.signature(getattr(CudaOps, name)).parameters.values())[1:]
    flags = [each.kind == each.KEYWORD_ONLY for each in ours]
    theirs = [each.kwarg_only for each in schema.arguments]
    assert flags == theirs[: len(flags) - 1] + [True]
    assert all(each.has_default_value() for each in schema.arguments[len(flags) - 1 :])


@pytest.mark.parametrize("make", [Flash, Cudnn, GatheredFlash, Exact])
def test_operators_of_torch_take_what_they_are_given(make: Callable[[], AttentionKernel]) -> None:
    dtype = torch.float32 if make is Exact else torch.bfloat16
    tiles = (
        dense_tiles()
        if make is not GatheredFlash
        else Tiles(np.eye(3, dtype=bool)[None].repeat(4, 0), 16, 16, 37, 37)
    )
    heads = (4, 2, 2, 4) if make in (Flash, Cudnn) else (4, 4, 4, 4)
    with fake_cuda() as seen:
        q, k, v, grad = (torch.empty(2, each, 37, 40, dtype=dtype, device="cuda") for each in heads)
        kernel = make()
        for _ in range(2):
            seen.clear()
            out, lse = kernel.attend(q, k, v, tiles, 0.3)
            grads = kernel.attend_backward(grad, q, k, v, (out, lse), tiles, 0.3)
        assert not seen.faults or make is GatheredFlash and set(seen.faults) == {"widened"}
        assert (out.shape, out.dtype) == (q.shape, dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        assert [x.shape for x in grads] == [q.shape, k.shape, v.shape]


def test_the_log_sum_exp_of_memory_efficient_attention_must_be_padded() -> None:
    q, k, v, grad = (x.float() for x in operands(2, 2, 2, 2))
    ops = CudaOps()
    out, lse, *state = ops._scaled_dot_product_efficient_attention(q, k, v, None, True, scale=0.3)
    rest = *state, 0.0, [True, True, True, False], False
    for wrong, rule in ((lse[..., :37].contiguous(), "strideH"), (lse * 0, "weigh nothing")):
        with pytest.raises(ContractError, match=rule):
            ops._scaled_dot_product_efficient_attention_backward(
                grad, q, k, v, None, out, wrong, *rest, scale=0.3
            )


@pytest.mark.parametrize("name", ["ulysses", "usp:2x2", "ring+balanced"])
def test_heads_of_which_nothing_is_left_out_go_to_the_dense_kernel(name: str) -> None:
    case = replace(odd_case(name, 7), problem=replace(odd_case(name, 7).problem, heads=8, kv_heads=8))
    rows, cols = -(-case.problem.q.size // 16), -(-case.problem.kv.size // 32)
    tiles = np.random.default_rng(0).random((8, rows, cols)) < 0.4
    tiles[[0, 1, 4, 7]] = True
    sizes = {"q_len": case.problem.q.size, "kv_len": case.problem.kv.size, "block_q": 16, "block_k": 32}
    ops, others = CudaOps(), CudaOps()
    dense, sparse = Flash(ops), GatheredFlash(others)
    check(
        replace(case, mask=BlockMask.from_tiles(tiles, **sizes)), Composite((dense, dense), (sparse, sparse))
    )
    assert ops.calls.keys() == {"flash", "flash backward"}
    assert others.calls.keys() == {"flash", "flash backward"}, "rows that were gathered"
