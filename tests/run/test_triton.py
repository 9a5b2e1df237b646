"""The Triton kernels in Triton's interpreter against the reference: indices and arithmetic, not a GPU."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.run.dense import error
from tests.run.interpreted import ROOT, failures, report
from weft.core.errors import InputError
from weft.run.kernels import Accumulator, tuning
from weft.run.kernels.merge import merged
from weft.run.kernels.reference import ReferenceKernel
from weft.run.kernels.tiles import Tiles
from weft.run.kernels.triton_attention import TritonAttention
from weft.run.kernels.triton_configs import _TABLE as TABLE
from weft.run.kernels.triton_configs import SMALL_TARGETS, TARGETS, Config, configs

# Largest difference over the largest number: float32 sums in another order, float16 weights.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3}


@dataclass(frozen=True)
class Shape:
    """Random operands and a random mask in which the first row of blocks of head 0 is empty."""

    q_len: int = 128
    k_len: int = 128
    head_dim: int = 64
    block_q: int = 64
    block_k: int = 64
    batch: int = 1
    heads: int = 2
    group: int = 1
    """Query heads that read one head of k and v."""
    density: float | None = 0.6
    dtype: torch.dtype = torch.float32
    strided: bool = False
    scale: float = 0.2

    def tiles(self) -> Tiles:
        if self.density is None:
            return Tiles(None, self.q_len, self.k_len, self.q_len, self.k_len)
        shape = (self.heads, -(-self.q_len // self.block_q), -(-self.k_len // self.block_k))
        active = np.random.default_rng(7).random(shape) < self.density
        active[0, 0], active[-1, -1, 0] = False, True
        return Tiles(active, self.block_q, self.block_k, self.q_len, self.k_len)

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output."""
        random = torch.Generator().manual_seed(3)
        sizes = [
            (self.batch, heads, n, self.head_dim)
            for heads, n in (
                (self.heads, self.q_len),
                *[(self.heads // self.group, self.k_len)] * 2,
                (self.heads, self.q_len),
            )
        ]
        q, k, v, grad = (torch.randn(size, generator=random).to(self.dtype) for size in sizes)
        if self.strided:
            # [B, S, H, D] in memory; part of something larger with NaN after it; rows not in one piece.
            q, grad = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, grad))
            k = torch.cat([k, k + 1, k], -1)[..., self.head_dim : 2 * self.head_dim] - 1
            k = torch.cat([k, k * torch.nan], 2)[:, :, : self.k_len]
            v = v.mT.contiguous().mT
        return q, k, v, grad


SHAPES = {
    "square": Shape(),
    "ragged": Shape(q_len=150, k_len=170),
    "shorter than a block": Shape(q_len=5, k_len=3, density=1.0),
    "blocks of 128": Shape(q_len=256, k_len=256, block_q=128, block_k=128),
    "wide blocks, ragged": Shape(q_len=200, k_len=140, block_q=128, block_k=128),
    "oblong blocks": Shape(q_len=190, k_len=256, block_q=64, block_k=128),
    "head dim 128": Shape(head_dim=128, q_len=100, k_len=128),
    "batch of 2": Shape(batch=2, q_len=130),
    "strided": Shape(batch=2, strided=True, k_len=100),
    "dense": Shape(density=None, q_len=130, k_len=190),
    "dense, whole blocks": Shape(density=None, q_len=128, k_len=256),
    "nothing active": Shape(density=0.0),
    "negative scale": Shape(scale=-0.4),
    "zero scale": Shape(scale=0.0),
    "float16": Shape(dtype=torch.float16, q_len=150, k_len=170),
    "float16, head dim 128": Shape(dtype=torch.float16, head_dim=128),
    "grouped heads": Shape(heads=6, group=3, batch=2, q_len=150, k_len=130),
    "grouped heads, dense": Shape(heads=4, group=2, density=None, q_len=70, k_len=130),
    "head dim 24": Shape(head_dim=24, q_len=100),
    "head dim 20, float16": Shape(head_dim=20, dtype=torch.float16, k_len=100),
    "head dim 32": Shape(head_dim=32, q_len=100),
    "head dim 160": Shape(head_dim=160, q_len=40, k_len=70),
    "head dim 256, blocks of 32": Shape(head_dim=256, q_len=50, k_len=70, block_q=32, block_k=32),
    "head dim 96, dense, grouped": Shape(head_dim=96, density=None, q_len=70, k_len=80, heads=4, group=2),
    "blocks of 16": Shape(q_len=70, k_len=90, block_q=16, block_k=16, batch=2),
    "blocks of 128 by 16": Shape(q_len=150, k_len=90, block_q=128, block_k=16),
    "blocks of 16 by 32": Shape(q_len=70, k_len=90, block_q=16, block_k=32),
    "blocks of 48": Shape(q_len=110, k_len=96, block_q=48, block_k=48),
    "head dim 72, float16": Shape(head_dim=72, dtype=torch.float16, k_len=100),
}


def same(found: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    # Empty rows are compared first: a stand-in for their -inf must not set the scale of the others.
    assert torch.equal(found == -torch.inf, expected == -torch.inf)
    found, expected = (x.masked_fill(x == -torch.inf, 0.0) for x in (found, expected))
    assert found.dtype == torch.float32
    assert error(found, expected) <= TOLERANCE[dtype] * max(1.0, expected.abs().max().item())


def forward_is_the_reference(shape: Shape) -> None:
    q, k, v, _ = shape.operands()
    found = TritonAttention().attend(q, k, v, shape.tiles(), shape.scale)
    keys, values = (x.repeat_interleave(shape.group, 1) for x in (k, v))
    expected = ReferenceKernel().attend(q, keys, values, shape.tiles(), shape.scale)
    for x, y in zip(found, expected, strict=True):
        same(x, y, shape.dtype)
    empty = expected[1] == -torch.inf
    assert torch.equal(found[1] == -torch.inf, empty)
    assert not found[0][empty].any()


def backward_is_the_reference(shape: Shape) -> None:
    q, k, v, grad = shape.operands()
    keys, values = (x.repeat_interleave(shape.group, 1) for x in (k, v))
    done = ReferenceKernel().attend(q, keys, values, shape.tiles(), shape.scale)
    found = TritonAttention().attend_backward(grad, q, k, v, done, shape.tiles(), shape.scale)
    dq, *of_keys = ReferenceKernel().attend_backward(grad, q, keys, values, done, shape.tiles(), shape.scale)
    expected = dq, *(x.unflatten(1, (-1, shape.group)).sum(2) for x in of_keys)
    for x, y in zip(found, expected, strict=True):
        same(x, y, shape.dtype)


def halves(shape: Shape) -> tuple[list[slice], list[Tiles]]:
    """The keys in two parts, cut between blocks."""
    whole = shape.tiles()
    assert whole.active is not None
    cut = shape.block_k
    lengths = cut, shape.k_len - cut
    active = whole.active[:, :, :1], whole.active[:, :, 1:]
    parts = [
        Tiles(a, shape.block_q, shape.block_k, shape.q_len, n) for a, n in zip(active, lengths, strict=True)
    ]
    return [slice(0, cut), slice(cut, None)], parts


RAGGED = replace(SHAPES["ragged"], batch=2)


def a_running_sum_over_parts_is_the_whole() -> None:
    q, k, v, _ = RAGGED.operands()
    # As a caller holds it: [B, S, H, D] and an lse that is a column of something larger.
    out = torch.zeros(q.transpose(1, 2).shape).transpose(1, 2)
    lse = torch.full((*q.shape[:-1], 3), -torch.inf)[..., 1]
    for part, tiles in zip(*halves(RAGGED), strict=True):
        found = TritonAttention().attend(
            q, k[:, :, part], v[:, :, part], tiles, 0.2, into=Accumulator(out, lse)
        )
        assert found[0] is out and found[1] is lse
    expected = ReferenceKernel().attend(q, k, v, RAGGED.tiles(), 0.2)
    same(out, expected[0])
    same(lse, expected[1])


def gradients_of_parts_add_up() -> None:
    q, k, v, grad = RAGGED.operands()
    done = ReferenceKernel().attend(q, k, v, RAGGED.tiles(), 0.2)
    expected = ReferenceKernel().attend_backward(grad, q, k, v, done, RAGGED.tiles(), 0.2)
    (dq1, dk1, dv1), (dq2, dk2, dv2) = (
        TritonAttention().attend_backward(grad, q, k[:, :, part], v[:, :, part], done, tiles, 0.2)
        for part, tiles in zip(*halves(RAGGED), strict=True)
    )
    found = dq1 + dq2, torch.cat([dk1, dk2], 2), torch.cat([dv1, dv2], 2)
    for x, y in zip(found, expected, strict=True):
        same(x, y)


def a_float32_gradient_serves_16_bit_operands() -> None:
    shape = replace(SHAPES["float16"], strided=True)
    q, k, v, grad = shape.operands()
    done = ReferenceKernel().attend(q, k, v, shape.tiles(), 0.2)
    narrow, wide = (
        TritonAttention().attend_backward(g, q, k, v, done, shape.tiles(), 0.2) for g in (grad, grad.float())
    )
    assert all(torch.equal(x, y) for x, y in zip(narrow, wide, strict=True))


def lse_of_empty_rows_may_have_either_sign() -> None:
    shape = SHAPES["square"]
    q, k, v, grad = shape.operands()
    out, lse = ReferenceKernel().attend(q, k, v, shape.tiles(), 0.2)
    assert (lse == -torch.inf).any()
    other = lse.masked_fill(lse == -torch.inf, torch.inf)
    found = [
        TritonAttention().attend_backward(grad, q, k, v, (out, x), shape.tiles(), 0.2) for x in (lse, other)
    ]
    assert all(torch.equal(x, y) and x.isfinite().all() for x, y in zip(*found, strict=True))


def a_nan_reaches_the_rows_that_read_it_and_no_other() -> None:
    shape = SHAPES["wide blocks, ragged"]
    for at in (1, 2):  # a key, a value
        operands = list(shape.operands()[:3])
        operands[at][:, :, -1] = torch.nan
        out, _ = TritonAttention().attend(*operands, shape.tiles(), 0.2)
        mask = shape.tiles().token_mask
        assert mask is not None
        assert (out.isnan().any(-1) == mask[:, :, -1]).all()


def scores_far_apart_do_not_overflow() -> None:
    shape = SHAPES["ragged"]
    q, k, v, grad = shape.operands()
    exact = [x.double() for x in (q, k, v)]
    done = TritonAttention().attend(q, k, v, shape.tiles(), 40.0)
    grads = TritonAttention().attend_backward(grad, q, k, v, done, shape.tiles(), 40.0)
    final = ReferenceKernel().attend(*exact, shape.tiles(), 40.0)
    expected = ReferenceKernel().attend_backward(grad.double(), *exact, final, shape.tiles(), 40.0)
    # Scores reach 2000, of which float32 has 4 digits after the point.
    for x, y in zip([*done, *grads], [*final, *expected], strict=True):
        x, y = (z.masked_fill(z == -torch.inf, 0.0) for z in (x, y))
        assert error(x, y) <= 2e-3 * max(1.0, y.abs().max().item())


def no_keys_or_no_queries_give_nothing() -> None:
    q, k, v, grad = SHAPES["square"].operands()
    tiles = Tiles(None, 128, 0, 128, 0)
    done = TritonAttention().attend(q, k[:, :, :0], v[:, :, :0], tiles, 0.2)
    assert not done[0].any() and (done[1] == -torch.inf).all()
    dq, dk, _ = TritonAttention().attend_backward(grad, q, k[:, :, :0], v[:, :, :0], done, tiles, 0.2)
    assert not dq.any() and dk.shape[2] == 0
    tiles = Tiles(None, 0, 128, 0, 128)
    done = TritonAttention().attend(q[:, :, :0], k, v, tiles, 0.2)
    dq, dk, dv = TritonAttention().attend_backward(grad[:, :, :0], q[:, :, :0], k, v, done, tiles, 0.2)
    assert dq.shape[2] == 0 and not dk.any() and not dv.any()


def every_configuration_of_a_target_is_the_reference(target: str) -> None:
    """Pointers or descriptors, tiles smaller than blocks, products issued early, warps with roles."""
    shape = Shape(q_len=200, k_len=150, head_dim=40, block_q=128, block_k=128, heads=2, group=2)
    q, k, v, _ = shape.operands()
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    before = ReferenceKernel().attend(q, keys + 1, values, shape.tiles(), 0.2)
    expected = merged(
        ReferenceKernel().attend(q, keys, values, shape.tiles(), 0.2),
        Accumulator(*(x.clone() for x in before)),
    )
    for config in configs(target, "forward", 64, 128, 128):
        kernel = TritonAttention(interpreted_as=target)
        kernel._config = lambda *_, config=config: config
        found = kernel.attend(q, k, v, shape.tiles(), 0.2, into=Accumulator(*(x.clone() for x in before)))
        for x, y in zip(found, expected, strict=True):
            same(x, y)


def gradients_by_tiles_of_any_size_are_the_reference() -> None:
    """Warps and stages are nothing to the interpreter: each size of tiles of any target once."""
    shape = Shape(head_dim=40, q_len=140, k_len=130, block_q=128, block_k=128, batch=1)
    q, k, v, grad = shape.operands()
    done = ReferenceKernel().attend(q, k, v, shape.tiles(), 0.2)
    expected = ReferenceKernel().attend_backward(grad, q, k, v, done, shape.tiles(), 0.2)
    sizes = {
        Config(config.bq, config.bk, 4, 2)
        for (_, name, _), found in TABLE.items()
        for config in found
        if name != "forward"
    }
    assert len(sizes) > 5
    for config in sizes:
        kernel = TritonAttention()
        kernel._config = lambda *_, config=config: config
        for x, y in zip(
            kernel.attend_backward(grad, q, k, v, done, shape.tiles(), 0.2), expected, strict=True
        ):
            same(x, y)


def a_measurement_runs_the_configuration_that_it_is_for() -> None:
    for name, density in (("forward", 0), ("grad_queries", 2), ("grad_keys", 2)):
        blocks = (32, 16) if density else (128, 128)
        key = tuning.TuningKey("sm_90", name, 32, *blocks, "float32", 2, density, 7, 7)
        *_, config = tuning.candidates(key)
        keywords = Config.keywords
        with (
            patch.multiple(tuning, HEADS=2, REPEATS=2),
            patch.object(Config, "keywords", autospec=True, side_effect=keywords) as launches,
        ):
            seconds, results = tuning.measure(key, config, torch.device("cpu"))
        assert seconds > 0 and all(x.isfinite().all() for x in results)
        assert {each.args[0] for each in launches.call_args_list if each.args[1] == name} == {config}


def programs_follow_the_order() -> None:
    """The longest row of blocks comes first: a row that the order leaves out is not computed."""
    shape = SHAPES["square"]
    tiles, (q, k, v, _) = shape.tiles(), shape.operands()
    blocks = tiles.lists(q.device)
    assert blocks.order[0] == blocks.starts.diff().argmax()
    blocks.__dict__["order"] = torch.full_like(blocks.order, 3)
    out, lse = torch.full(q.shape, torch.nan), torch.full(q.shape[:-1], torch.nan)
    TritonAttention().attend(q, k, v, tiles, 0.2, into=Accumulator(out, lse, fresh=True))
    assert lse[0, 1, 64:].isfinite().all() and lse[0, :, :64].isnan().all() and lse[0, 0].isnan().all()


def operands_that_no_descriptor_describes_are_served() -> None:
    shape = Shape(q_len=70, k_len=100, head_dim=24, dtype=torch.float16, batch=2)
    q, k, v, _ = shape.operands()
    one = k[:, :1].expand(-1, 2, -1, -1)  # a stride of 0
    odd = torch.cat([v, v], -1)[..., 4:28]  # begins at 8 bytes
    narrow = torch.empty(2, 2, 100, 27, dtype=q.dtype)[..., :24].copy_(v)  # rows are 54 bytes apart
    for keys, values in ((one, v), (k, odd), (k, narrow)):
        found = TritonAttention().attend(q, keys, values, shape.tiles(), 0.2)
        for x, y in zip(found, ReferenceKernel().attend(q, keys, values, shape.tiles(), 0.2), strict=True):
            same(x, y, shape.dtype)


def rows_past_the_end_are_not_those_of_the_next_head() -> None:
    shape = Shape(q_len=70, k_len=70, density=None)
    q, k, v, _ = shape.operands()
    k[:, 1], v[:, 1] = torch.nan, torch.inf
    for target in ("sm_80", "sm_90"):
        out, lse = TritonAttention(interpreted_as=target).attend(q, k, v, shape.tiles(), 0.2)
        assert out[:, 0].isfinite().all() and lse[:, 0].isfinite().all()


def float16_is_as_good_as_torch() -> None:
    shape = Shape(q_len=128, k_len=256, density=None, dtype=torch.float16)
    q, k, v, grad = shape.operands()
    done = TritonAttention().attend(q, k, v, shape.tiles(), 0.2)
    found = done[0], *TritonAttention().attend_backward(grad, q, k, v, done, shape.tiles(), 0.2)
    results = []
    for dtype in (torch.float64, torch.float16):
        inputs = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*inputs, scale=0.2)
        results.append((out.detach(), *torch.autograd.grad(out, inputs, grad.to(dtype))))
    for ours, exact, torchs in zip(found, *results, strict=True):
        assert error(ours, exact) <= 1.5 * error(torchs, exact)


def merging_in_one_launch_is_merging() -> None:
    from weft.run.kernels.triton_merge import merge_on_device

    random = torch.Generator().manual_seed(5)
    for fresh, dtype, head_dim in itertools.product(
        (False, True), (torch.float32, torch.float16), (24, 64, 72)
    ):
        out = torch.randn(2, 37, 3, head_dim, generator=random).transpose(1, 2)
        new_out = torch.randn(2, 3, 37, head_dim, generator=random).to(dtype)
        lse, new_lse = (4 * torch.randn(2, 3, 37, 2, generator=random)[..., 1] for _ in range(2))
        lse[:, :, 3:9], new_lse[:, :, 6:12], lse[0, 0, 20] = -torch.inf, -torch.inf, torch.nan
        if fresh and dtype == torch.float16:
            out = out.half()
        expected = merged((new_out, new_lse), Accumulator(out.clone(), lse.clone(), fresh))
        merge_on_device((out, lse), (new_out, new_lse), fresh=fresh)
        for x, y in zip((out, lse), expected, strict=True):
            assert torch.equal(x.isnan(), y.isnan()) and (fresh or bool(x[0, 0, 20].isnan().all()))
            same(*(z.float().masked_fill(z.isnan(), 0.0) for z in (x, y)))


def what_it_cannot_serve_it_refuses() -> None:
    q, k, v, grad = SHAPES["square"].operands()
    tiles = SHAPES["square"].tiles()
    odd = Tiles(np.ones((2, 6, 6), dtype=bool), 24, 24, 128, 128)
    short = Tiles(None, 64, 128, 64, 128)
    refused: list[tuple[str, tuple[Tensor, ...], Tiles]] = [
        ("head dims", tuple(torch.cat([x] * 5, -1) for x in (q, k, v)), tiles),
        ("float64", (q.double(), k.double(), v.double()), tiles),
        ("bfloat16", (q.bfloat16(), k.bfloat16(), v.bfloat16()), tiles),
        ("float16", (q, k.half(), v), tiles),
        ("24 by 24", (q, k, v), odd),
        ("do not fit", (q, k, v), short),
    ]
    for words, operands, given in refused:
        done = torch.zeros(operands[0].shape), torch.zeros(operands[0].shape[:-1])
        with pytest.raises(InputError, match=words):
            TritonAttention().attend(*operands, given, 0.2)
        with pytest.raises(InputError, match=words):
            TritonAttention().attend_backward(grad, *operands, done, given, 0.2)
    with pytest.raises(InputError, match="float32"):
        TritonAttention().attend(q, k, v, tiles, 0.2, into=Accumulator(q.double(), q[..., 0].double()))


def checks() -> dict[str, Callable[[], None]]:
    plain = [
        a_running_sum_over_parts_is_the_whole,
        gradients_of_parts_add_up,
        a_float32_gradient_serves_16_bit_operands,
        lse_of_empty_rows_may_have_either_sign,
        a_nan_reaches_the_rows_that_read_it_and_no_other,
        scores_far_apart_do_not_overflow,
        no_keys_or_no_queries_give_nothing,
        gradients_by_tiles_of_any_size_are_the_reference,
        a_measurement_runs_the_configuration_that_it_is_for,
        programs_follow_the_order,
        operands_that_no_descriptor_describes_are_served,
        rows_past_the_end_are_not_those_of_the_next_head,
        float16_is_as_good_as_torch,
        merging_in_one_launch_is_merging,
        what_it_cannot_serve_it_refuses,
    ]
    found: dict[str, Callable[[], None]] = {check.__name__: check for check in plain}
    for target in (*TARGETS, *SMALL_TARGETS):
        found[f"forward as on {target}"] = partial(every_configuration_of_a_target_is_the_reference, target)
    for name, shape in SHAPES.items():
        found[f"forward, {name}"] = lambda shape=shape: forward_is_the_reference(shape)
        found[f"backward, {name}"] = lambda shape=shape: backward_is_the_reference(shape)
    return found


@pytest.fixture(scope="module")
def failed() -> dict[str, str]:
    return failures("tests.run.test_triton", list(checks()))


@pytest.mark.parametrize("name", checks())
def test_in_the_interpreter(failed: dict[str, str], name: str) -> None:
    assert name not in failed, failed[name]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_tensors_on_the_cpu_are_refused_where_nothing_is_interpreted() -> None:
    code = """
import torch
from weft.run.kernels import triton_attention
from weft.run.kernels import tuning
from weft.run.kernels.triton_attention import TritonAttention
from weft.run.kernels.tiles import Tiles
q = torch.zeros(1, 1, 64, 64)
TritonAttention().attend(q, q, q, Tiles(None, 64, 64, 64, 64), 1.0)
"""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert "InputError: Tensors of backend='triton' must be on a GPU" in done.stderr


def test_importing_the_kernel_does_not_import_triton() -> None:
    code = "import sys, weft.run.kernels.triton_attention; sys.exit('triton.language' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


if __name__ == "__main__":
    report(checks())
