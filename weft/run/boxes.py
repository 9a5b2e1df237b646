"""Boxes: rectangles of heads and rows between two tensors, as a table that one kernel launch copies.

A box is a run of contiguous elements, repeated along up to five dims that have a stride at either end. The
table is made once; `weft.run.kernels.triton_copy` reads it on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd, prod
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.core.indices import IntArray

DIMS = 5
FIRST_TILE = 6 + 3 * DIMS
"""The last field of a box. Before it: kind; base and offset of the source, of the target; length of a run;
and for each dim its size and its strides at source and target."""
FIELDS = FIRST_TILE + 1
MAX_COLUMNS = 256
"""Elements of a run that one program reads side by side; a longer run is cut into rows."""
WIDEST = 16
"""Bytes that one thread reads at once."""
VECTORS, ADDED_VECTORS = 1024, 512
"""Of them in a tile: eight for each thread; half as many where the target is read too."""

Table = npt.NDArray[np.int64]
Dim = tuple[int, int, int]
"""Size, stride of the source and stride of the target, in elements."""


class End(NamedTuple):
    """One tensor of a copy: where it begins, counted in elements from a base, and how it lies."""

    base: int
    """0: address 0; from 1 on: what a launch is given."""
    offset: int
    strides: tuple[int, ...]
    item_bytes: int
    alignment: int
    """Bytes that the address of the base is a multiple of, at most WIDEST."""


class Runs(NamedTuple):
    """Stretches of indices that are one after another at both ends."""

    source: IntArray
    target: IntArray
    sizes: IntArray


class Part(NamedTuple):
    """Elements of one tensor that go to another of the same shape but for the dims that are cut."""

    kind: int
    source: End
    target: End
    shape: tuple[int, ...]
    runs: dict[int, Runs]
    """By dim; what is not there is copied whole."""


class Plan(NamedTuple):
    """What a launch needs: the table, which box each program works on, and the constants of the kernel."""

    table: Table
    tiles: npt.NDArray[np.int32]
    vector: int
    """Elements that offsets, strides and lengths of the table are counted in."""
    rows: int
    columns: int


def runs_of(source: slice | IntArray, target: slice | IntArray) -> Runs:
    """Cut positions where they are not one after another at either end."""
    if isinstance(source, slice) and isinstance(target, slice):
        starts = (source.start, target.start, source.stop - source.start)
        return Runs(*(np.array([n], dtype=np.int64) for n in starts))
    a, b = (np.arange(at.start, at.stop) if isinstance(at, slice) else at for at in (source, target))
    first = np.flatnonzero(np.concatenate(([True], (np.diff(a) != 1) | (np.diff(b) != 1))))
    return Runs(a[first], b[first], np.diff(np.append(first, a.size)))


def plan(parts: Sequence[Part], *, add: bool) -> Plan:
    """Lay out the table of a copy, or of an addition, of parts whose targets do not overlap."""
    boxes = [rows for part in parts for rows in _boxes(part)]
    table = np.concatenate(boxes) if boxes else np.empty((0, FIELDS), dtype=np.int64)
    longest = int(table[:, 5].max(initial=1))
    columns = min(MAX_COLUMNS, _power_of_two(longest))
    if longest > columns:
        table = _cut_runs(table, columns)
    _put_longest_dim_first(table)
    vector = _vector(table, parts)
    most = (ADDED_VECTORS if add else VECTORS) * vector // columns
    rows = max(1, min(most, _power_of_two(int(table[:, 6].max(initial=1)))))
    sizes = table[:, 6:FIRST_TILE:3]
    counts = -(-sizes[:, 0] // rows) * sizes[:, 1:].prod(axis=1)
    table[:, FIRST_TILE] = np.cumsum(counts) - counts
    counted = [2, 4, 5, *range(7, FIRST_TILE, 3), *range(8, FIRST_TILE, 3)]
    table[:, counted] //= vector
    tiles = np.repeat(np.arange(len(table), dtype=np.int32), counts)
    return Plan(table, tiles, vector, rows, columns)


def _boxes(part: Part) -> list[Table]:
    """The boxes of a part: one for each pair of a run of heads and a run of rows."""
    dims = sorted(part.runs)
    grids = [
        np.meshgrid(*each, indexing="ij") for each in zip(*(part.runs[dim] for dim in dims), strict=True)
    ]
    starts, ends, sizes = ([grid.ravel() for grid in each] for each in grids)
    source_at, target_at = (
        end.offset + np.sum([at * end.strides[dim] for dim, at in zip(dims, firsts, strict=True)], axis=0)
        for end, firsts in ((part.source, starts), (part.target, ends))
    )
    found: list[Table] = []
    shapes, which = np.unique(np.stack(sizes), axis=1, return_inverse=True)
    for number, cut in enumerate(shapes.T.tolist()):
        shape = list(part.shape)
        for dim, size in zip(dims, cut, strict=True):
            shape[dim] = size
        if not prod(shape):
            continue
        box, length = _merged(shape, part.source.strides, part.target.strides)
        same = which.ravel() == number
        rows = np.zeros((int(same.sum()), FIELDS), dtype=np.int64)
        rows[:, 0], rows[:, 1], rows[:, 3] = part.kind, part.source.base, part.target.base
        rows[:, 2], rows[:, 4], rows[:, 5] = source_at[same], target_at[same], length
        rows[:, 6:FIRST_TILE] = np.array(_padded(box)).ravel()
        found.append(rows)
    return found


def _merged(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> tuple[list[Dim], int]:
    """Dims, the outermost first, and a contiguous run: neighbours that lie as one dim become one."""
    dims: list[Dim] = []
    for size, s, t in zip(shape, source, target, strict=True):
        if size == 1:
            continue
        if dims and dims[-1][1:] == (s * size, t * size):
            dims[-1] = dims[-1][0] * size, s, t
        else:
            dims.append((size, s, t))
    length = dims.pop()[0] if dims and dims[-1][1:] == (1, 1) else 1
    return dims, length


def _padded(dims: list[Dim]) -> list[Dim]:
    # One is left for runs that are cut.
    assert len(dims) < DIMS, f"{dims} are more than {DIMS - 1} dims"
    return [*dims, *[(1, 0, 0)] * (DIMS - len(dims))]


def _cut_runs(table: Table, columns: int) -> Table:
    """Cut long runs into rows of `columns`, and what is left over into a box of its own."""
    whole, rest = table.copy(), table.copy()
    length = table[:, 5]
    long = length > columns
    last = FIRST_TILE - 3
    whole[long, last], whole[long, last + 1], whole[long, last + 2] = (
        length[long] // columns,
        columns,
        columns,
    )
    whole[long, 5] = columns
    done = length // columns * columns
    rest[:, 2] += done
    rest[:, 4] += done
    rest[:, 5] -= done
    return np.concatenate([whole, rest[long & (rest[:, 5] > 0)]])


def _put_longest_dim_first(table: Table) -> None:
    """Rows of a tile are taken along the first dim, so it should be long."""
    dims = table[:, 6:FIRST_TILE].reshape(-1, DIMS, 3)
    order = np.argsort(-dims[:, :, 0], axis=1, kind="stable")
    table[:, 6:FIRST_TILE] = np.take_along_axis(dims, order[:, :, None], axis=1).reshape(len(table), -1)


def _vector(table: Table, parts: Sequence[Part]) -> int:
    """The most elements that every address and length is a multiple of, up to WIDEST bytes."""
    ends = [end for part in parts for end in (part.source, part.target)]
    most = WIDEST // min((end.item_bytes for end in ends), default=1)
    for end in ends:
        if end.alignment < WIDEST:
            most = min(most, max(1, end.alignment // end.item_bytes))
    counted = table[:, [2, 4, 5, *range(7, FIRST_TILE, 3), *range(8, FIRST_TILE, 3)]]
    return gcd(most, int(np.gcd.reduce(counted, axis=None))) if counted.size else most


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
