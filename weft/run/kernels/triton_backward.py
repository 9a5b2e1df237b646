"""Triton: gradients of block-sparse attention, dQ by q block and dK/dV by kv block, without atomics.

Both read the final log-sum-exp of the rows, so a tile's gradient is right whichever ranks computed the
other tiles of its rows, and every sum is made by one program in one order.
"""
# ruff: noqa: PLR0913 - a launch has as many arguments as it has

from __future__ import annotations

import triton
import triton.language as tl

from weft.run.kernels.triton_forward import (
    INFINITY,
    LOG2E,
    corner,
    fetch,
    in_numbers,
    line_of,
    place_of,
    tile_of,
)


@triton.jit
def prepare(
    grad, out, lse, delta, peak, narrow,
    grad_strides, out_strides, lse_strides, narrow_strides,
    heads, q_len,
    UNIT: tl.constexpr, D: tl.constexpr, DPAD: tl.constexpr, NARROW: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(grad · out), lse in units of log 2 with +inf for empty rows, and grad in 16 bits."""
    grad_strides, out_strides = in_numbers(grad_strides, UNIT), in_numbers(out_strides, UNIT)
    narrow_strides = in_numbers(narrow_strides, UNIT)
    top = tl.program_id(0) * ROWS
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows, dims = tl.arange(0, ROWS), tl.arange(0, DPAD)
    inside = top + rows < q_len
    held = inside[:, None] & (dims < D)[None, :]
    grad_at = corner(grad, grad_strides, batch, head, top) + rows[:, None] * grad_strides[2] + dims[None, :]
    out_at = corner(out, out_strides, batch, head, top) + rows[:, None] * out_strides[2] + dims[None, :]
    slope = tl.load(grad_at, mask=held, other=0.0).to(tl.float32)
    result = tl.load(out_at, mask=held, other=0.0).to(tl.float32)
    row_at = tl.program_id(1).to(tl.int64) * q_len + top + rows
    tl.store(delta + row_at, tl.sum(slope * result, 1), mask=inside)
    final = tl.load(corner(lse, lse_strides, batch, head, top) + rows * lse_strides[2], inside, 0.0)
    # Every weight of an empty row is exp(score - inf) = 0.
    tl.store(peak + row_at, tl.where(final == -INFINITY, INFINITY, final * LOG2E), mask=inside)
    if NARROW:
        narrow_at = corner(narrow, narrow_strides, batch, head, top) + rows[:, None] * narrow_strides[2]
        tl.store(narrow_at + dims[None, :], slope.to(narrow.dtype.element_ty), mask=held)


@triton.jit
def grad_queries(
    q, k, v, grad, delta, peak, dq, starts, blocks, order,
    q_strides, k_strides, v_strides, grad_strides, dq_strides,
    scale, heads, q_len, k_len,
    UNIT: tl.constexpr, D: tl.constexpr, DPAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DENSE: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dQ of BQ rows of one head: the list of their kv blocks."""
    q_strides, k_strides = in_numbers(q_strides, UNIT), in_numbers(k_strides, UNIT)
    v_strides, grad_strides = in_numbers(v_strides, UNIT), in_numbers(grad_strides, UNIT)
    dq_strides = in_numbers(dq_strides, UNIT)
    q_blocks, k_blocks = tl.cdiv(q_len, BLOCK_Q), tl.cdiv(k_len, BLOCK_K)
    batch, head, top = place_of(order, heads, q_blocks, BLOCK_Q, BQ, DENSE)
    first, count = line_of(starts, head, top // BLOCK_Q, q_blocks, k_blocks, DENSE)
    rows, dims, columns = tl.arange(0, BQ), tl.arange(0, DPAD), tl.arange(0, BK)
    inside, real = top + rows < q_len, dims < D
    held = inside[:, None] & real[None, :]
    WHOLE: tl.constexpr = EVEN and D == DPAD

    q_at = corner(q, q_strides, batch, head, top) + rows[:, None] * q_strides[2] + dims[None, :]
    grad_at = corner(grad, grad_strides, batch, head, top) + rows[:, None] * grad_strides[2] + dims[None, :]
    row_at = (batch * heads + head).to(tl.int64) * q_len + top + rows
    queries = tl.load(q_at, mask=held, other=0.0)
    slope = tl.load(grad_at, mask=held, other=0.0)
    row_delta = tl.load(delta + row_at, mask=inside, other=0.0)
    row_peak = tl.load(peak + row_at, mask=inside, other=INFINITY)
    k_spots = columns[:, None] * k_strides[2] + dims[None, :]
    v_spots = columns[None, :] * v_strides[2] + dims[:, None]

    sums = tl.zeros([BQ, DPAD], tl.float32)
    steps = tl.where(top < q_len, count * (BLOCK_K // BK), 0)
    left = tile_of(blocks, first, tl.full([], 0, tl.int32), steps, BLOCK_K, BK, DENSE)
    for step in range(steps):
        known = left + columns < k_len
        k_at = corner(k, k_strides, batch, head // GROUP, left) + k_spots
        keys = fetch(k_at, known[:, None] & real[None, :], 0.0, WHOLE)
        scores = tl.dot(queries, tl.trans(keys)) * (scale * LOG2E)
        if not EVEN:
            scores = tl.where(known[None, :], scores, -INFINITY)
        weights = tl.exp2(scores - row_peak[:, None])
        v_at = corner(v, v_strides, batch, head // GROUP, left) + v_spots
        values = fetch(v_at, known[None, :] & real[:, None], 0.0, WHOLE)
        slopes = weights * (tl.dot(slope, values) - row_delta[:, None])
        sums = tl.dot(slopes.to(keys.dtype), keys, sums)
        left = tile_of(blocks, first, step + 1, steps, BLOCK_K, BK, DENSE)
    dq_at = corner(dq, dq_strides, batch, head, top) + rows[:, None] * dq_strides[2] + dims[None, :]
    tl.store(dq_at, sums * scale, mask=held)


@triton.jit
def grad_keys(
    q, k, v, grad, delta, peak, dk, dv, starts, blocks, order,
    q_strides, k_strides, v_strides, grad_strides, dk_strides, dv_strides,
    scale, heads, q_len, k_len,
    UNIT: tl.constexpr, D: tl.constexpr, DPAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DENSE: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """dK and dV of BK keys for one query head: the inverted list, the q blocks that read them.

    What heads that share keys make of them is added up later: a loop over them in here spills registers.
    Scores are kept transposed, [BK, BQ], so that both sums are products with no transpose of registers.
    """
    q_strides, k_strides = in_numbers(q_strides, UNIT), in_numbers(k_strides, UNIT)
    v_strides, grad_strides = in_numbers(v_strides, UNIT), in_numbers(grad_strides, UNIT)
    dk_strides, dv_strides = in_numbers(dk_strides, UNIT), in_numbers(dv_strides, UNIT)
    q_blocks, k_blocks = tl.cdiv(q_len, BLOCK_Q), tl.cdiv(k_len, BLOCK_K)
    batch, head, left = place_of(order, heads, k_blocks, BLOCK_K, BK, DENSE)
    first, count = line_of(starts, head, left // BLOCK_K, k_blocks, q_blocks, DENSE)
    rows, dims, columns = tl.arange(0, BQ), tl.arange(0, DPAD), tl.arange(0, BK)
    known, real = left + columns < k_len, dims < D
    held = known[:, None] & real[None, :]
    WHOLE: tl.constexpr = EVEN and D == DPAD

    k_at = corner(k, k_strides, batch, head // GROUP, left) + columns[:, None] * k_strides[2] + dims[None, :]
    v_at = corner(v, v_strides, batch, head // GROUP, left) + columns[:, None] * v_strides[2] + dims[None, :]
    keys = tl.load(k_at, mask=held, other=0.0)
    values = tl.load(v_at, mask=held, other=0.0)
    q_spots = rows[:, None] * q_strides[2] + dims[None, :]
    grad_spots = rows[:, None] * grad_strides[2] + dims[None, :]
    row_top = (batch * heads + head).to(tl.int64) * q_len

    k_sums, v_sums = tl.zeros([BK, DPAD], tl.float32), tl.zeros([BK, DPAD], tl.float32)
    steps = tl.where(left < k_len, count * (BLOCK_Q // BQ), 0)
    top = tile_of(blocks, first, tl.full([], 0, tl.int32), steps, BLOCK_Q, BQ, DENSE)
    for step in range(steps):
        inside = top + rows < q_len
        present = inside[:, None] & real[None, :]
        queries = fetch(corner(q, q_strides, batch, head, top) + q_spots, present, 0.0, WHOLE)
        row_peak = fetch(peak + row_top + top + rows, inside, INFINITY, EVEN)
        scores = tl.dot(keys, tl.trans(queries)) * (scale * LOG2E)
        # Rows past the end have peak = inf, so their weights are 0; keys past the end are not stored.
        weights = tl.exp2(scores - row_peak[None, :])
        slope = fetch(corner(grad, grad_strides, batch, head, top) + grad_spots, present, 0.0, WHOLE)
        v_sums = tl.dot(weights.to(slope.dtype), slope, v_sums)
        row_delta = fetch(delta + row_top + top + rows, inside, 0.0, EVEN)
        slopes = weights * (tl.dot(values, tl.trans(slope)) - row_delta[None, :])
        k_sums = tl.dot(slopes.to(queries.dtype), queries, k_sums)
        top = tile_of(blocks, first, step + 1, steps, BLOCK_Q, BQ, DENSE)
    dk_at = corner(dk, dk_strides, batch, head, left) + columns[:, None] * dk_strides[2] + dims[None, :]
    dv_at = corner(dv, dv_strides, batch, head, left) + columns[:, None] * dv_strides[2] + dims[None, :]
    tl.store(dk_at, k_sums * scale, mask=held)
    tl.store(dv_at, v_sums, mask=held)
