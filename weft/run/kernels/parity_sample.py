"""A few blocks on which a kernel must equal the reference: ragged ends, empty rows and unread keys."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import numpy as np
import torch
from torch import Tensor

from weft.run.kernels import Kernel, guarded
from weft.run.kernels.reference import Reference
from weft.run.kernels.rules import Work
from weft.run.kernels.tiles import Tiles

TOLERANCE = {"bfloat16": 0.03, "float16": 0.006}
"""The largest error, in units of the largest number expected; rounding makes a sixth of it or less."""
LSE_TOLERANCE = 0.02
_BATCH, _BLOCKS, _KV_HEADS, _DENSE_BLOCK = 2, 4, 2, 128


@dataclass(frozen=True)
class Sample:
    """Operands in float64, of numbers that the dtype of the work has exactly."""

    tiles: Tiles
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    scale: float

    @staticmethod
    def of(work: Work) -> Sample:
        block_q, block_k = (work.block_q, work.block_k) if work.sparse else (_DENSE_BLOCK, _DENSE_BLOCK)
        # The last blocks are mostly missing: to read beyond the end changes much.
        rows, keys = (block * (_BLOCKS - 1) + block // 4 + 3 for block in (block_q, block_k))
        tiles = Tiles(_mask(_KV_HEADS * work.group), block_q, block_k, rows, keys)
        if not work.sparse:
            tiles = Tiles(None, rows, keys, rows, keys)
        return Sample.drawn(tiles, work)

    @staticmethod
    def drawn(tiles: Tiles, work: Work) -> Sample:
        """Random operands for any tiles of the work's dtype, head dim and group."""
        heads, rows, keys = _KV_HEADS * work.group, tiles.q_len, tiles.kv_len
        random = torch.Generator().manual_seed(7)

        def some(heads: int, tokens: int) -> Tensor:
            shape = _BATCH, tokens, heads, work.head_dim
            numbers = torch.randn(shape, generator=random, dtype=torch.float64)
            return numbers.to(getattr(torch, work.dtype)).double().transpose(1, 2)

        q, k, v, grad = some(heads, rows), some(_KV_HEADS, keys), some(_KV_HEADS, keys), some(heads, rows)
        return Sample(tiles, q, k, v, grad, work.head_dim**-0.5)

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


def examine(kernel: Kernel, work: Work, device: torch.device) -> str:
    """Compare a kernel with the reference in float64; return what is wrong, or ""."""
    work = work if kernel.grouped else replace(work, group=1)
    computed = compute(kernel, Sample.of(work), work, device)
    lse = computed.pop("lse", None)
    errors = (why for name, pair in computed.items() if (why := _wrong(name, *pair, work)))
    return next(errors, "") or (_wrong_lse(*lse) if lse else "")


@torch.no_grad()
def compute(
    kernel: Kernel, sample: Sample, work: Work, device: torch.device
) -> dict[str, tuple[Tensor, Tensor]]:
    """Run a kernel on a sample in the direction of the work; return by name what it found and float64's."""
    dtype = getattr(torch, work.dtype)
    q, k, v = (x.to(device, dtype) for x in (sample.q, sample.k, sample.v))
    out, lse = Reference().attend(*sample.expanded, sample.tiles, sample.scale)
    if not work.backward:
        found_out, found_lse = kernel.attend(q, k, v, sample.tiles, sample.scale)
        return {"output": (found_out, out), "lse": (found_lse, lse)}
    # As if other keys, on other ranks, had a part in these rows.
    out, lse = out.to(dtype).double(), guarded(lse + 0.25)
    final = out.to(device, torch.float32), lse.to(device, torch.float32)
    grad = sample.grad.to(device, dtype)
    found = kernel.attend_backward(grad, q, k, v, final, sample.tiles, sample.scale)
    dq, *shared = Reference().attend_backward(
        sample.grad, *sample.expanded, (out, lse), sample.tiles, sample.scale
    )
    expected = dq, *(x.unflatten(1, (sample.k.shape[1], -1)).sum(2) for x in shared)
    return dict(zip(("dq", "dk", "dv"), zip(found, expected, strict=True), strict=True))


def _wrong(name: str, found: Tensor, expected: Tensor, work: Work) -> str:
    if found.shape != expected.shape:
        return f"its {name} has shape {tuple(found.shape)}, not {tuple(expected.shape)}."
    found = found.double().cpu()
    if not found.isfinite().all():
        return f"its {name} is not finite."
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    limit = TOLERANCE[work.dtype]
    return f"its {name} is off by {error:.2g} of the largest value, limit {limit}." if error > limit else ""


def _wrong_lse(found: Tensor, expected: Tensor) -> str:
    found = found.double().cpu()
    if not torch.equal(found == -inf, expected == -inf):
        return "its log-sum-exp is not -inf in exactly the rows that read nothing."
    error = (found - expected).masked_fill(expected == -inf, 0.0).abs().nan_to_num(inf).max().item()
    return f"its log-sum-exp is off by {error:.2g}, limit {LSE_TOLERANCE}." if error > LSE_TOLERANCE else ""
