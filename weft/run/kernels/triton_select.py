"""Selection in Triton: the same lists as `select.pick_rows`, a program per row, without a sort.

The floats of a row become integers of the same order. A bisection over the 32 bits finds the key at
which the budget is reached; what lies above it is chosen, what equals it in the order of the index
until the budget is full. A second pass writes the chosen indices, in order, where the row begins.
Blocks have a mass (top-p) or count as 1 each (top-k); that is the only difference between the two.
Importing this module imports triton.
"""
# ruff: noqa: PLR0913 - a launch has as many arguments as it has

# What triton compiles is not what pyright reads: a jitted call has no Python result.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from weft.core.errors import InputError
from weft.run.kernels.select import ScoreRows, target_mass
from weft.run.kernels.triton_attention import on_device

MAX_BLOCKS = (
    1 << 13
)  # blocks that a program holds in registers; NVIDIA spills none up to here, AMD up to 2048
HIGHEST = tl.constexpr(2**31 - 1)  # above the key of +inf
LOWEST = tl.constexpr(-(2**31))  # below the key of -inf


@triton.jit
def row_of(scores, kept, mass, size, WIDTH: tl.constexpr, KEPT: tl.constexpr, MASS: tl.constexpr):
    """(key, whether it may be chosen, whether it is kept, mass) of the blocks of this program's row."""
    at = tl.program_id(0).to(tl.int64) * size
    cols = tl.arange(0, WIDTH)
    known = cols < size
    score = tl.load(scores + at + cols, mask=known, other=float("-inf"))
    bits = score.to(tl.int32, bitcast=True)
    key = tl.where(bits < 0, bits ^ HIGHEST, bits)
    keep = tl.load(kept + at + cols, mask=known, other=0) != 0 if KEPT else cols < 0
    weight = tl.load(mass + at + cols, mask=known, other=0) if MASS else known.to(tl.int32)
    return key, (score > float("-inf")) & ~keep, keep, weight


@triton.jit
def chosen_of(key, free, keep, weight, cut, need):
    """Kept, above the cut, or at it while the budget lasts."""
    above = free & (key > cut)
    equal = tl.where(free & (key == cut), weight, 0)
    left = need - tl.sum(tl.where(above, weight, 0))
    fits = tl.cumsum(equal, 0) - equal < left
    return keep | above | (free & (key == cut) & fits)


@triton.jit
def find_cuts(
    scores,
    kept,
    mass,
    target,
    cuts,
    needs,
    counts,
    size,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    MASS: tl.constexpr,
):
    row = tl.program_id(0)
    key, free, keep, weight = row_of(scores, kept, mass, size, WIDTH, KEPT, MASS)
    need = tl.load(target + row).to(weight.dtype) - tl.sum(tl.where(keep, weight, 0))
    weight = tl.where(free, weight, 0)
    # At `low` the budget is reached, at `high` it is not; a budget of nothing is cut above all keys.
    high = tl.full((), HIGHEST, tl.int32)
    low = tl.where(need > 0, tl.full((), LOWEST, tl.int32), high)
    for _ in range(32):
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without overflow
        reached = tl.sum(tl.where(key >= middle, weight, 0)) >= need
        low = tl.where(reached, middle, low)
        high = tl.where(reached, high, middle)
    chosen = chosen_of(key, free, keep, weight, low, need)
    tl.store(cuts + row, low)
    tl.store(needs + row, need.to(tl.int64))
    tl.store(counts + row, tl.sum(chosen.to(tl.int32)))


@triton.jit
def write_lists(
    scores,
    kept,
    mass,
    starts,
    cuts,
    needs,
    kv,
    size,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    MASS: tl.constexpr,
):
    row = tl.program_id(0)
    key, free, keep, weight = row_of(scores, kept, mass, size, WIDTH, KEPT, MASS)
    need = tl.load(needs + row).to(weight.dtype)
    chosen = chosen_of(key, free, keep, weight, tl.load(cuts + row), need)
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(kv + tl.load(starts + row) + place, tl.arange(0, WIDTH), mask=chosen)


class TritonSelection:
    """Select by Triton; the lists of chunks are appended in memory with room for all of them."""

    def __init__(self, room: int, device: torch.device) -> None:
        self._kv = torch.empty(room, dtype=torch.int32, device=device)
        self._end = torch.zeros(1, dtype=torch.int64, device=device)

    def kv(self) -> Tensor:
        return self._kv

    def pick(self, rows: ScoreRows, allowed: Tensor) -> Tensor:
        """Return the counts of rows, int32; `allowed` as in `Budget`."""
        count, size = rows.scores.shape
        if size > MAX_BLOCKS:
            raise InputError(
                f"backend='triton' selects from at most {MAX_BLOCKS} kv blocks, not {size}.",
                hint="Take larger blocks or backend='torch'.",
            )
        scores = rows.scores.contiguous()
        mass = rows.mass() if allowed.is_floating_point() else None
        # A row has at most all blocks, so that counts fit into 32 bits.
        target = allowed.clamp(max=size) if mass is None else target_mass(allowed, mass.sum(-1))
        kept = None if rows.kept is None else rows.kept.to(torch.int8)
        shape = {"WIDTH": triton.next_power_of_2(size), "KEPT": kept is not None, "MASS": mass is not None}
        shape["num_warps"] = min(16, max(1, shape["WIDTH"] // 256))
        # Missing operands are never read: any pointer will do.
        operands = (scores, scores if kept is None else kept, scores if mass is None else mass)
        cuts, counts = (torch.empty(count, dtype=torch.int32, device=scores.device) for _ in range(2))
        needs = torch.empty(count, dtype=torch.int64, device=scores.device)
        _launch(find_cuts, count, *operands, target, cuts, needs, counts, size, **shape)
        ends = counts.cumsum(0) + self._end
        _launch(write_lists, count, *operands, ends - counts, cuts, needs, self._kv, size, **shape)
        self._end = ends[-1:]
        return counts


def _launch(kernel: Any, programs: int, *arguments: Any, **shape: int) -> None:
    scores: Tensor = arguments[0]
    if not isinstance(scores, FakeTensor):
        with on_device(scores.device):
            kernel[(programs,)](*arguments, **shape)
