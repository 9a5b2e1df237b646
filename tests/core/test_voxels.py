"""Voxel order: a permutation that makes whole cubes whole blocks, for any grid."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InputError
from weft.core.voxels import Voxels

sizes = st.tuples(st.integers(1, 6), st.integers(1, 9), st.integers(1, 9))
sides = st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(1, 5))
voxels = st.builds(Voxels, sizes, sides, st.integers(0, 9), st.integers(0, 9))


def naive_cubes(v: Voxels) -> list[list[int]]:
    """Cube by cube, in raster order of the cubes: the tokens of each, in raster order."""
    ranges = [range(0, size, side) for size, side in zip(v.grid, v.cube, strict=True)]
    found: list[list[int]] = []
    for corner in itertools.product(*ranges):
        inside = [
            range(start, min(start + side, size))
            for start, side, size in zip(corner, v.cube, v.grid, strict=True)
        ]
        _, h, w = v.grid
        found.append([v.prefix + (a * h + b) * w + c for a, b, c in itertools.product(*inside)])
    return found


@given(voxels)
def test_the_order_is_a_permutation_and_leaves_the_text_in_place(v: Voxels) -> None:
    assert sorted(v.order.tolist()) == list(range(v.length))
    assert (v.order[v.inverse] == np.arange(v.length)).all()
    assert (v.inverse[v.order] == np.arange(v.length)).all()
    for start, stop in v.text:
        assert v.order[start:stop].tolist() == list(range(start, stop))


@given(voxels)
def test_every_cube_is_one_run_whole_ones_first_and_in_raster_order(v: Voxels) -> None:
    runs = [v.order[a:b].tolist() for a, b in itertools.pairwise(v.bounds)]
    naive = naive_cubes(v)
    assert sorted(runs) == sorted(naive)
    whole = math.prod(size // side for size, side in zip(v.grid, v.cube, strict=True))
    assert runs[:whole] == [cube for cube in naive if len(cube) == v.block]
    assert v.bounds[0] == v.prefix
    assert v.bounds[-1] == v.length - v.suffix
    assert all(v.bounds[: whole + 1] == v.prefix + np.arange(whole + 1) * v.block)


def test_wrong_sizes_are_refused() -> None:
    for bad in ({"grid": (0, 1, 1), "cube": (1, 1, 1)}, {"grid": (1, 1, 1), "cube": (1, 1, 0)}):
        with pytest.raises(InputError, match="must be three sizes"):
            Voxels(**bad)
    with pytest.raises(InputError, match="must be ≥ 0, got -1"):
        Voxels((1, 1, 1), (1, 1, 1), prefix=-1)
