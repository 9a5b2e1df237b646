"""Triton: copy many boxes in one launch, one program for each tile of rows of a box.

A box is a contiguous run, repeated along up to five dims with strides in source and target. Their table
is on the device. Bases are addresses; base 0 is 0, for fixed memory, whose addresses are in the table itself.
Importing this module imports triton.
"""
# ruff: noqa: PLR0913 - a launch has as many arguments as it has

# What triton compiles is not what pyright reads: a jitted call has no Python result.
# pyright: reportGeneralTypeIssues=false, reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import triton
import triton.language as tl

from weft.run.boxes import DIMS, FIELDS, FIRST_TILE

_FIELDS, _FIRST_TILE, _DIMS = tl.constexpr(FIELDS), tl.constexpr(FIRST_TILE), tl.constexpr(DIMS)


@triton.jit
def base_of(bases, which):
    address = which * 0
    for i in tl.static_range(len(bases)):
        address = tl.where(which == i + 1, bases[i], address)
    return address


@triton.jit
def pointer_to(address, offset, DTYPE: tl.constexpr, VEC: tl.constexpr):
    """Return a pointer with the alignment that `boxes.box_table` guarantees."""
    BYTES: tl.constexpr = VEC * DTYPE.primitive_bitwidth // 8
    pointer = address.to(tl.pointer_type(DTYPE)) + offset * VEC
    return tl.multiple_of(pointer, BYTES if BYTES < 16 else 16)


@triton.jit
def copy_boxes(
    table,
    tiles,
    bases,
    PAIRS: tl.constexpr,
    VEC: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    ADD: tl.constexpr,
):
    """PAIRS are the dtypes of source and target by kind; offsets, strides and lengths count VEC elements."""
    tile = tl.program_id(0)
    box = table + tl.load(tiles + tile).to(tl.int64) * _FIELDS
    kind = tl.load(box)
    source, target = base_of(bases, tl.load(box + 1)), base_of(bases, tl.load(box + 3))
    source_at, target_at = tl.load(box + 2), tl.load(box + 4)
    length = tl.load(box + 5) * VEC
    size, source_step, target_step = tl.load(box + 6), tl.load(box + 7), tl.load(box + 8)
    rest = tile - tl.load(box + _FIRST_TILE)
    blocks = tl.cdiv(size, ROWS)
    first = rest % blocks * ROWS
    rest = rest // blocks
    for dim in tl.static_range(1, _DIMS):
        at = rest % tl.load(box + 6 + 3 * dim)
        rest = rest // tl.load(box + 6 + 3 * dim)
        source_at += at * tl.load(box + 7 + 3 * dim)
        target_at += at * tl.load(box + 8 + 3 * dim)
    row, col = first + tl.arange(0, ROWS), tl.arange(0, COLS)
    known = (row < size)[:, None] & (col < length)[None, :]
    reads = (row * source_step * VEC)[:, None] + col[None, :]
    writes = (row * target_step * VEC)[:, None] + col[None, :]
    for i in tl.static_range(len(PAIRS)):
        if kind == i:
            x = tl.load(pointer_to(source, source_at, PAIRS[i][0], VEC) + reads, mask=known)
            into = pointer_to(target, target_at, PAIRS[i][1], VEC) + writes
            x = x.to(PAIRS[i][1])
            if ADD:
                x += tl.load(into, mask=known)
            tl.store(into, x, mask=known)
