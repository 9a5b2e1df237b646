"""Triton: block-sparse flash attention over an index list.

One program computes BQ query rows of one head. Names of the rows and columns of the mask's blocks are
BLOCK_Q and BLOCK_K; a program's tiles BQ and BK divide them, so that a tile never meets two blocks.
Importing this module imports triton.
"""
# ruff: noqa: PLR0913 - a launch has as many arguments as it has

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def corner(x, strides, batch, head, row):
    """Where (batch, head, row) begins; 64 bits, a long video has more than 2^31 numbers."""
    return (
        x + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
    )


@triton.jit
def line_of(starts, head, row, rows, columns, DENSE: tl.constexpr):
    """(first, count) of the list of blocks of (head, row), which has `rows` rows per head."""
    if DENSE:
        first = tl.full([], 0, tl.int32)
        count = columns
    else:
        at = starts + head * rows + row
        first = tl.load(at)
        count = tl.load(at + 1) - first
    return first, count


@triton.jit
def tile_of(blocks, first, step, steps, BLOCK: tl.constexpr, TILE: tl.constexpr, DENSE: tl.constexpr):
    """The first token of the step-th tile of a list of blocks; past the last one, some token.

    Loops ask for the next tile before they need it. Loads whose address was itself loaded in the same step
    are not pipelined everywhere: Triton 3.7 left out those of grad_keys.
    """
    PARTS: tl.constexpr = BLOCK // TILE
    if DENSE:
        return step * TILE
    else:
        block = tl.load(blocks + first + step // PARTS, mask=step < steps, other=0)
        return block * BLOCK + (step % PARTS) * TILE


@triton.jit
def fetch(at, known, other, EVEN: tl.constexpr):
    """A load inside the loop; EVEN says that no block is ragged, and no mask is made."""
    return tl.load(at) if EVEN else tl.load(at, mask=known, other=other)


@triton.jit
def forward(
    q, k, v, out, lse, starts, blocks,
    q_strides, k_strides, v_strides, out_strides, lse_strides,
    scale, heads, q_len, k_len,
    D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DENSE: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, ADD: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """out and lse of these tiles; ADD continues from the (out, lse) that is there, which is a merge.

    GROUP query heads read each head of k and v.
    """
    top = tl.program_id(0) * BQ
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    q_blocks, k_blocks = tl.cdiv(q_len, BLOCK_Q), tl.cdiv(k_len, BLOCK_K)
    first, count = line_of(starts, head, top // BLOCK_Q, q_blocks, k_blocks, DENSE)
    rows, dims, columns = tl.arange(0, BQ), tl.arange(0, D), tl.arange(0, BK)
    inside = top + rows < q_len
    if ADD:  # nothing to add, nothing to read or write
        inside = inside & (count > 0)

    q_at = corner(q, q_strides, batch, head, top) + rows[:, None] * q_strides[2] + dims[None, :]
    out_at = corner(out, out_strides, batch, head, top) + rows[:, None] * out_strides[2] + dims[None, :]
    lse_at = corner(lse, lse_strides, batch, head, top) + rows * lse_strides[2]
    queries = tl.load(q_at, mask=inside[:, None], other=0.0)
    # Inside a tile 32 bits are enough.
    k_spots = columns[None, :] * k_strides[2] + dims[:, None]
    v_spots = columns[:, None] * v_strides[2] + dims[None, :]

    if ADD:
        sums = tl.load(out_at, mask=inside[:, None], other=0.0)
        peak = tl.load(lse_at, mask=inside, other=-INFINITY) * LOG2E
        total = tl.where(peak == -INFINITY, 0.0, 1.0)
    else:
        sums = tl.zeros([BQ, D], tl.float32)
        peak = tl.full([BQ], -INFINITY, tl.float32)
        total = tl.zeros([BQ], tl.float32)
    # Scores are in units of log 2: exp2 is one instruction.
    scale = scale * LOG2E
    steps = count * (BLOCK_K // BK)
    left = tile_of(blocks, first, tl.full([], 0, tl.int32), steps, BLOCK_K, BK, DENSE)
    for step in range(steps):
        known = left + columns < k_len
        keys = fetch(corner(k, k_strides, batch, head // GROUP, left) + k_spots, known[None, :], 0.0, EVEN)
        scores = tl.dot(queries, keys) * scale
        if not EVEN:
            scores = tl.where(known[None, :], scores, -INFINITY)
        # A block has at least one key in its first tile, so after it the peak is finite.
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        values = fetch(corner(v, v_strides, batch, head // GROUP, left) + v_spots, known[:, None], 0.0, EVEN)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None])
        peak = higher
        left = tile_of(blocks, first, step + 1, steps, BLOCK_K, BK, DENSE)
    # No active tile: 0 / 1 and -inf.
    tl.store(out_at, sums / tl.where(total == 0.0, 1.0, total)[:, None], mask=inside[:, None])
    tl.store(lse_at, (peak + tl.log2(total)) / LOG2E, mask=inside)
