"""Operands on which a kernel must equal the reference: ragged ends, empty rows and unread keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch
from torch import Tensor

from weft.run.kernels import AttentionKernel, guarded
from weft.run.kernels.reference import ReferenceKernel
from weft.run.kernels.rules import KernelSpec
from weft.run.kernels.tiles import Tiles

TOLERANCE = {"bfloat16": 0.03, "float16": 0.006}
"""Largest allowed error, relative to the largest expected number; rounding causes a sixth of it or less."""
LSE_TOLERANCE = 0.02
_BATCH, _BLOCKS, _KV_HEADS, _DENSE_BLOCK = 2, 4, 2, 128


@dataclass(frozen=True)
class ParitySample:
    """Operands in float64, of numbers that the dtype of the work has exactly."""

    tiles: Tiles
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    scale: float

    @staticmethod
    def of(spec: KernelSpec) -> ParitySample:
        block_q, block_k = (spec.block_q, spec.block_k) if spec.sparse else (_DENSE_BLOCK, _DENSE_BLOCK)
        # The last blocks are mostly missing: to read beyond the end changes much.
        rows, keys = (block * (_BLOCKS - 1) + block // 4 + 3 for block in (block_q, block_k))
        tiles = Tiles(_mask(_KV_HEADS * spec.group), block_q, block_k, rows, keys)
        if not spec.sparse:
            tiles = Tiles(None, rows, keys, rows, keys)
        return ParitySample.drawn(tiles, spec)

    @staticmethod
    def drawn(tiles: Tiles, spec: KernelSpec) -> ParitySample:
        """Random operands for any tiles of the work's dtype, head dim and group."""
        heads, rows, keys = _KV_HEADS * spec.group, tiles.q_len, tiles.kv_len
        random = torch.Generator().manual_seed(7)

        def some(heads: int, tokens: int) -> Tensor:
            shape = _BATCH, tokens, heads, spec.head_dim
            numbers = torch.randn(shape, generator=random, dtype=torch.float64)
            return numbers.to(getattr(torch, spec.dtype)).double().transpose(1, 2)

        q, k, v, grad = some(heads, rows), some(_KV_HEADS, keys), some(_KV_HEADS, keys), some(heads, rows)
        return ParitySample(tiles, q, k, v, grad, spec.head_dim**-0.5)

    @property
    def expanded(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v with a key/value head for each query head."""
        group = self.q.shape[1] // self.k.shape[1]
        return self.q, self.k.repeat_interleave(group, 1), self.v.repeat_interleave(group, 1)


def _mask(heads: int) -> np.ndarray:
    active = np.random.default_rng(7).random((heads, _BLOCKS, _BLOCKS)) < 0.6
    active[0, 1] = False  # rows that read nothing
    active[0, 2] = (False, False, False, True)  # rows that read the ragged block only
    active[-1] = True
    active[-1, :, 1] = False  # keys that are not read
    return active


def compare_with_reference(kernel: AttentionKernel, spec: KernelSpec, device: torch.device) -> str:
    """Compare a kernel with the reference in float64; return what is wrong, or ""."""
    spec = spec if kernel.grouped else replace(spec, group=1)
    computed = run_on_sample(kernel, ParitySample.of(spec), spec, device)
    lse = computed.pop("lse", None)
    errors = (why for name, pair in computed.items() if (why := _wrong(name, *pair, spec)))
    return next(errors, "") or (_wrong_lse(*lse) if lse else "")


@torch.no_grad()
def run_on_sample(
    kernel: AttentionKernel, sample: ParitySample, spec: KernelSpec, device: torch.device
) -> dict[str, tuple[Tensor, Tensor]]:
    """Run a kernel on a sample in the direction of the work; return by name what it actual and float64's."""
    dtype = getattr(torch, spec.dtype)
    q, k, v = (x.to(device, dtype) for x in (sample.q, sample.k, sample.v))
    out, lse = ReferenceKernel().attend(*sample.expanded, sample.tiles, sample.scale)
    if not spec.backward:
        actual_out, actual_lse = kernel.attend(q, k, v, sample.tiles, sample.scale)
        return {"output": (actual_out, out), "lse": (actual_lse, lse)}
    # As if these rows had other keys, on other ranks.
    out, lse = out.to(dtype).double(), guarded(lse + 0.25)
    final = out.to(device, torch.float32), lse.to(device, torch.float32)
    grad = sample.grad.to(device, dtype)
    actual = kernel.attend_backward(grad, q, k, v, final, sample.tiles, sample.scale)
    dq, *shared = ReferenceKernel().attend_backward(
        sample.grad, *sample.expanded, (out, lse), sample.tiles, sample.scale
    )
    expected = dq, *(x.unflatten(1, (sample.k.shape[1], -1)).sum(2) for x in shared)
    return dict(zip(("dq", "dk", "dv"), zip(actual, expected, strict=True), strict=True))


def _wrong(name: str, actual: Tensor, expected: Tensor, spec: KernelSpec) -> str:
    if actual.shape != expected.shape:
        return f"its {name} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}."
    actual = actual.double().cpu()
    if not actual.isfinite().all():
        return f"its {name} is not finite."
    error = ((actual - expected).abs().max() / expected.abs().max()).item()
    limit = TOLERANCE[spec.dtype]
    return f"its {name} is off by {error:.2g} of the largest value, limit {limit}." if error > limit else ""


def _wrong_lse(actual: Tensor, expected: Tensor) -> str:
    actual = actual.double().cpu()
    if not torch.equal(actual == -inf, expected == -inf):
        return "its log-sum-exp is not -inf in exactly the rows that read nothing."
    error = (actual - expected).masked_fill(expected == -inf, 0.0).abs().nan_to_num(inf).max().item()
    return f"its log-sum-exp is off by {error:.2g}, limit {LSE_TOLERANCE}." if error > LSE_TOLERANCE else ""
