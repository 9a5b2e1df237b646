"""Triton: block-sparse flash attention over an index list.

One program computes BQ query rows of one head. Names of the rows and columns of the mask's blocks are
BLOCK_Q and BLOCK_K; a program's tiles BQ and BK divide them, so that a tile never spans two blocks.
Rows have D numbers and are computed with DPAD, a power of two; what is behind D is 0 and is not stored.
Importing this module imports triton.
"""
# ruff: noqa: PLR0913 - a launch has as many arguments as it has

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def in_numbers(strides, UNIT: tl.constexpr):
    """Convert strides from units of UNIT numbers, so that the compiler knows that rows are aligned."""
    return strides[0] * UNIT, strides[1] * UNIT, strides[2] * UNIT


@triton.jit
def corner(x, strides, batch, head, row):
    """Where (batch, head, row) begins; 64 bits, a long video has more than 2^31 numbers."""
    return (
        x + batch.to(tl.int64) * strides[0] + head.to(tl.int64) * strides[1] + row.to(tl.int64) * strides[2]
    )


@triton.jit
def place_of(order, heads, blocks, BLOCK: tl.constexpr, TILE: tl.constexpr, DENSE: tl.constexpr):
    """(batch, head, first token) of a program, those of the longest lists first: one that begins last is
    one that the others wait for. There are `blocks` lists per head."""
    if DENSE:
        batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
        return batch, head, tl.program_id(0) * TILE
    else:
        PARTS: tl.constexpr = BLOCK // TILE
        batches = tl.num_programs(0) // (heads * blocks * PARTS)
        batch, place = tl.program_id(0) % batches, tl.program_id(0) // batches
        line = tl.load(order + place // PARTS)
        return batch, line // blocks, (line % blocks) * BLOCK + (place % PARTS) * TILE


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

    Loops prefetch the next tile. Loads whose address was itself loaded in the same step
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
    """Load inside the loop; without a mask if EVEN (no block is ragged)."""
    return tl.load(at) if EVEN else tl.load(at, mask=known, other=other)


@triton.jit
def rows_of(
    x, strides, batch, head, row, length,
    D: tl.constexpr, DPAD: tl.constexpr, ROWS: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[ROWS, DPAD] of (batch, head) from `row` on; rows past `length` and numbers past D are 0.

    With TMA, x is a descriptor of [batch, heads, length, D], and the copy unit of the GPU writes the zeros.
    It has four dims because in one of two the rows past the end would be the next head's.
    """
    if TMA:
        return x.load([batch, head, row, 0]).reshape(ROWS, DPAD)
    else:
        rows, dims = tl.arange(0, ROWS), tl.arange(0, DPAD)
        at = corner(x, strides, batch, head, row) + rows[:, None] * strides[2] + dims[None, :]
        known = (row + rows < length)[:, None] & (dims < D)[None, :]
        return fetch(at, known, 0.0, EVEN and D == DPAD)


@triton.jit
def store_rows(
    out, sums, kept, inside,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write `sums` to the columns from FIRST on; ADD adds to `kept` times what is there.

    It does so by 64 columns at once: what is there need not fit into registers beside all the sums.
    """
    if WIDTH > 64:
        HALF: tl.constexpr = WIDTH // 2
        left, right = tl.split(tl.permute(tl.reshape(sums, [ROWS, 2, HALF]), (0, 2, 1)))
        store_rows(out, left, kept, inside, FIRST, HALF, ROWS, D, ADD)
        store_rows(out, right, kept, inside, FIRST + HALF, HALF, ROWS, D, ADD)
    elif FIRST < D:
        dims = FIRST + tl.arange(0, WIDTH)
        stored = inside[:, None] & (dims < D)[None, :]
        if ADD:
            sums += tl.load(out + dims[None, :], mask=stored, other=0.0) * kept[:, None]
        tl.store(out + dims[None, :], sums, mask=stored)


@triton.jit
def finish(
    out, lse, out_strides, lse_strides, sums, peak, total, batch, head, top, q_len, count,
    BQ: tl.constexpr, D: tl.constexpr, DPAD: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Store out and lse of the rows of a program, or with ADD their merge with what is there."""
    rows = tl.arange(0, BQ)
    inside = top + rows < q_len
    if ADD:  # nothing to add, nothing to read or write
        inside = inside & (count > 0)
    out_at = corner(out, out_strides, batch, head, top) + rows[:, None] * out_strides[2]
    lse_at = corner(lse, lse_strides, batch, head, top) + rows * lse_strides[2]
    shrink, kept = tl.full([BQ], 1.0, tl.float32), tl.zeros([BQ], tl.float32)
    if ADD:
        before = tl.load(lse_at, mask=inside, other=-INFINITY) * LOG2E
        higher = tl.maximum(peak, before)
        shrink, kept = tl.exp2(peak - higher), tl.exp2(before - higher)
        total = total * shrink + kept
        peak = higher
    tl.store(lse_at, (peak + tl.log2(total)) / LOG2E, mask=inside)
    # No active tile: 0 / 1 and -inf.
    total = tl.where(total == 0.0, 1.0, total)
    store_rows(out_at, sums * (shrink / total)[:, None], kept / total, inside, 0, DPAD, BQ, D, ADD)


@triton.jit
def forward(
    q, k, v, out, lse, starts, blocks, order,
    q_strides, k_strides, v_strides, out_strides, lse_strides,
    scale, heads, q_len, k_len,
    UNIT: tl.constexpr, D: tl.constexpr, DPAD: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DENSE: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, ADD: tl.constexpr, TMA: tl.constexpr,
    BQ: tl.constexpr, BK: tl.constexpr, EARLY: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """out and lse of these tiles; ADD continues from the (out, lse) that is there, which is a merge.

    GROUP query heads read each head of k and v. EARLY issues the product of the next keys before the
    exponentials of these. SPECIALIZE gives loads, products and exponentials warps of their own.
    """
    q_strides, k_strides = in_numbers(q_strides, UNIT), in_numbers(k_strides, UNIT)
    v_strides, out_strides = in_numbers(v_strides, UNIT), in_numbers(out_strides, UNIT)
    q_blocks, k_blocks = tl.cdiv(q_len, BLOCK_Q), tl.cdiv(k_len, BLOCK_K)
    batch, head, top = place_of(order, heads, q_blocks, BLOCK_Q, BQ, DENSE)
    first, count = line_of(starts, head, top // BLOCK_Q, q_blocks, k_blocks, DENSE)
    steps = tl.where(top < q_len, count * (BLOCK_K // BK), 0)
    columns = tl.arange(0, BK)
    queries = rows_of(q, q_strides, batch, head, top, q_len, D, DPAD, BQ, EVEN=False, TMA=TMA)
    sums = tl.zeros([BQ, DPAD], tl.float32)
    peak = tl.full([BQ], -INFINITY, tl.float32)
    total = tl.zeros([BQ], tl.float32)
    # Scores are in units of log 2: exp2 is one instruction.
    scale = scale * LOG2E
    of_keys = head // GROUP
    left = tile_of(blocks, first, tl.full([], 0, tl.int32), steps, BLOCK_K, BK, DENSE)
    if EARLY:
        keys = rows_of(k, k_strides, batch, of_keys, left, k_len, D, DPAD, BK, EVEN, TMA)
        products = tl.dot(queries, tl.trans(keys))
    after = tile_of(blocks, first, tl.full([], 1, tl.int32), steps, BLOCK_K, BK, DENSE)
    for step in tl.range(steps, warp_specialize=SPECIALIZE):
        if EARLY:
            keys = rows_of(k, k_strides, batch, of_keys, after, k_len, D, DPAD, BK, EVEN, TMA)
            scores, products = products * scale, tl.dot(queries, tl.trans(keys))
        else:
            keys = rows_of(k, k_strides, batch, of_keys, left, k_len, D, DPAD, BK, EVEN, TMA)
            scores = tl.dot(queries, tl.trans(keys)) * scale
        if EARLY or not EVEN:  # with a mask in every case, what is EARLY overlaps in every case
            scores = tl.where((left + columns < k_len)[None, :], scores, -INFINITY)
        # A block has at least one key in its first tile, so after it the peak is finite.
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        values = rows_of(v, v_strides, batch, of_keys, left, k_len, D, DPAD, BK, EVEN, TMA)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None])
        peak = higher
        left = tile_of(blocks, first, step + 1, steps, BLOCK_K, BK, DENSE)
        if EARLY:
            after = tile_of(blocks, first, step + 2, steps, BLOCK_K, BK, DENSE)
    finish(
        out, lse, out_strides, lse_strides, sums, peak, total,
        batch, head, top, q_len, count, BQ, D, DPAD, ADD,
    )  # fmt: skip
