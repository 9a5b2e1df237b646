"""Boxes: strided copies between tensors, as a table that one kernel launch executes.

A box is a run of contiguous elements, repeated along up to five dims with a stride in the source and in the
target. The table is built once; `weft.run.kernels.triton_copy` reads it on the device.
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
and for each dim its size and its strides in source and target."""
FIELDS = FIRST_TILE + 1
_IN_VECTORS = [2, 4, 5, *range(7, FIRST_TILE, 3), *range(8, FIRST_TILE, 3)]
"""Fields that are offsets, strides or lengths."""
MAX_COLUMNS = 256
"""Elements of a run that one program reads at once; a longer run is cut into rows."""
WIDEST = 16
"""Bytes that one thread reads at once."""
VECTORS, ADDED_VECTORS = 1024, 512
"""Vectors in a tile: eight for each thread; half as many if the target is read too."""

Table = npt.NDArray[np.int64]
Dim = tuple[int, int, int]
"""Size, stride of the source and stride of the target, in elements."""


class End(NamedTuple):
    """Source or target of a copy: its offset from a base, in elements, and its strides."""

    base: int
    """0: address 0; from 1 on: an address that is passed to a launch."""
    offset: int
    strides: tuple[int, ...]
    item_bytes: int
    alignment: int
    """Alignment of the base in bytes, at most WIDEST."""


class Runs(NamedTuple):
    """Runs of indices that are contiguous in source and target."""

    source: IntArray
    target: IntArray
    sizes: IntArray


class StridedCopy(NamedTuple):
    """Copy elements of one tensor to another of the same shape except in the dims with runs."""

    kind: int
    source: End
    target: End
    shape: tuple[int, ...]
    runs: dict[int, Runs]
    """By dim; other dims are copied whole."""


class BoxTable(NamedTuple):
    """Boxes, the box of each program, and the constants of the kernel."""

    table: Table
    tiles: npt.NDArray[np.int32]
    vector: int
    """Unit of offsets, strides and lengths, in elements."""
    rows: int
    columns: int


def runs_of(source: slice | IntArray, target: slice | IntArray) -> Runs:
    """Cut positions into runs that are contiguous in source and target."""
    if isinstance(source, slice) and isinstance(target, slice):
        starts = (source.start, target.start, source.stop - source.start)
        return Runs(*(np.array([n], dtype=np.int64) for n in starts))
    a, b = _positions(source), _positions(target)
    first = np.flatnonzero(np.concatenate(([True], (np.diff(a) != 1) | (np.diff(b) != 1))))
    return Runs(a[first], b[first], np.diff(np.append(first, a.size)))


def _positions(at: slice | IntArray) -> IntArray:
    return np.arange(at.start, at.stop, dtype=np.int64) if isinstance(at, slice) else at


def box_table(copies: Sequence[StridedCopy], *, add: bool) -> BoxTable:
    """Build the table of copies, or of additions, whose targets do not overlap."""
    boxes = [rows for copy in copies for rows in _boxes(copy)]
    table = np.concatenate(boxes) if boxes else np.empty((0, FIELDS), dtype=np.int64)
    longest = int(table[:, 5].max(initial=1))
    columns = min(MAX_COLUMNS, _power_of_two(longest))
    if longest > columns:
        table = _cut_runs(table, columns)
    _put_longest_dim_first(table)
    vector = _vector(table, copies)
    most = (ADDED_VECTORS if add else VECTORS) * vector // columns
    rows = max(1, min(most, _power_of_two(int(table[:, 6].max(initial=1)))))
    sizes = table[:, 6:FIRST_TILE:3]
    counts = -(-sizes[:, 0] // rows) * sizes[:, 1:].prod(axis=1)
    table[:, FIRST_TILE] = np.cumsum(counts) - counts
    table[:, _IN_VECTORS] //= vector
    tiles = np.repeat(np.arange(len(table), dtype=np.int32), counts)
    return BoxTable(table, tiles, vector, rows, columns)


def _boxes(copy: StridedCopy) -> list[Table]:
    """Return the boxes of a copy: one for each pair of a run of heads and a run of rows."""
    dims = sorted(copy.runs)
    grids = [
        np.meshgrid(*each, indexing="ij") for each in zip(*(copy.runs[dim] for dim in dims), strict=True)
    ]
    starts, ends, sizes = ([grid.ravel() for grid in each] for each in grids)
    source_at, target_at = (
        end.offset + np.sum([at * end.strides[dim] for dim, at in zip(dims, firsts, strict=True)], axis=0)
        for end, firsts in ((copy.source, starts), (copy.target, ends))
    )
    tables: list[Table] = []
    shapes, which = np.unique(np.stack(sizes), axis=1, return_inverse=True)
    for number, cut in enumerate(shapes.T.tolist()):
        shape = list(copy.shape)
        for dim, size in zip(dims, cut, strict=True):
            shape[dim] = size
        if not prod(shape):
            continue
        box, length = _merged(shape, copy.source.strides, copy.target.strides)
        same = which.ravel() == number
        rows = np.zeros((int(same.sum()), FIELDS), dtype=np.int64)
        rows[:, 0], rows[:, 1], rows[:, 3] = copy.kind, copy.source.base, copy.target.base
        rows[:, 2], rows[:, 4], rows[:, 5] = source_at[same], target_at[same], length
        rows[:, 6:FIRST_TILE] = np.array(_padded(box)).ravel()
        tables.append(rows)
    return tables


def _merged(shape: Sequence[int], source: Sequence[int], target: Sequence[int]) -> tuple[list[Dim], int]:
    """Merge dims where strides allow; return dims, the outermost first, and a contiguous run."""
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
    # One dim is left for runs that are cut.
    assert len(dims) < DIMS, f"{dims} are more than {DIMS - 1} dims"
    return [*dims, *[(1, 0, 0)] * (DIMS - len(dims))]


def _cut_runs(table: Table, columns: int) -> Table:
    """Cut long runs into rows of `columns`, and the remainder into a box of its own."""
    cut, rest = table.copy(), table.copy()
    length = table[:, 5]
    long = length > columns
    last = FIRST_TILE - 3
    cut[long, last] = length[long] // columns
    cut[long, last + 1 : last + 3] = columns
    cut[long, 5] = columns
    done = length // columns * columns
    rest[:, 2] += done
    rest[:, 4] += done
    rest[:, 5] -= done
    return np.concatenate([cut, rest[long & (rest[:, 5] > 0)]])


def _put_longest_dim_first(table: Table) -> None:
    """Sort dims by length: the rows of a tile lie along the first dim, which should be long."""
    dims = table[:, 6:FIRST_TILE].reshape(-1, DIMS, 3)
    order = np.argsort(-dims[:, :, 0], axis=1, kind="stable")
    table[:, 6:FIRST_TILE] = np.take_along_axis(dims, order[:, :, None], axis=1).reshape(len(table), -1)


def _vector(table: Table, copies: Sequence[StridedCopy]) -> int:
    """Return the most elements, up to WIDEST bytes, that divide every address and length."""
    ends = [end for copy in copies for end in (copy.source, copy.target)]
    most = WIDEST // min((end.item_bytes for end in ends), default=1)
    for end in ends:
        if end.alignment < WIDEST:
            most = min(most, max(1, end.alignment // end.item_bytes))
    counted = table[:, _IN_VECTORS]
    return gcd(most, int(np.gcd.reduce(counted, axis=None))) if counted.size else most


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()
