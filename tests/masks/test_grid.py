"""TokenGrid: blocks of any length over text and video."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from tests.masks.oracle import blocks, grids, places
from weft.core.codec import dumps, loads
from weft.core.errors import InputError
from weft.masks.grid import TokenGrid

quick = settings(max_examples=100, deadline=None)


@quick
@given(grids, blocks)
def test_a_block_is_text_if_one_of_its_tokens_is(grid: TokenGrid, block: int) -> None:
    sequence = places(grid)
    assert grid.tokens == len(sequence)
    wanted = [None in sequence[start : start + block] for start in range(0, len(sequence), block)]
    assert grid.text(block).tolist() == wanted
    assert grid.blocks(block) == len(wanted)


@quick
@given(grids, blocks)
def test_centres_are_the_mean_of_the_video_tokens_in_any_order(grid: TokenGrid, block: int) -> None:
    raster = places(grid)
    middle = [(size - 1) / 2 for size in grid.extent]
    for order in (None, grid.voxels((2, 2, 2)).order):
        sequence = raster if order is None else [raster[token] for token in order]
        cut = [sequence[start : start + block] for start in range(0, len(sequence), block)]
        video = [[place for place in each if place] for each in cut]
        wanted = [np.mean(each, axis=0) if each else middle for each in video]
        assert grid.centers(block, order) == pytest.approx(np.array(wanted), abs=1e-5)


@quick
@given(grids, blocks)
def test_every_block_is_a_run_of_whole_cells(grid: TokenGrid, block: int) -> None:
    for cells in (grid.pieces(block), grid.cubes(block, (2, 3, 2))):
        assert cells.starts[cells.firsts].tolist() == list(range(0, grid.tokens, block))
        stops = [*cells.starts[1:], grid.tokens]
        for start, stop, text in zip(cells.starts, stops, cells.text, strict=True):
            assert start // block == (stop - 1) // block
            assert {place is None for place in places(grid)[start:stop]} == {bool(text)}


def test_a_grid_survives_json() -> None:
    grid = TokenGrid(3, 5, 7, prefix=4, suffix=1)
    assert loads(dumps(grid)) == grid


@pytest.mark.parametrize("sizes", [(0, 5, 7), (3, 5, 7, -1), (3, 5, 7, 0, -2)])
def test_an_empty_grid_is_refused(sizes: tuple[int, ...]) -> None:
    with pytest.raises(InputError):
        TokenGrid(*sizes)


def test_a_block_of_no_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="block must be ≥ 1 token, got 0"):
        TokenGrid(3, 5, 7).blocks(0)
