"""Geometric masks against their rule asked token by token, on grids that nothing divides."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.masks.oracle import Place, blocks, grids, places, tiles
from weft.core.errors import InputError
from weft.core.mask import BoolArray
from weft.masks.grid import TokenGrid
from weft.masks.paro import paro_mask
from weft.masks.radial import radial_mask
from weft.masks.sta import sta_mask
from weft.masks.svg import svg_mask

boxes = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
shares = st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0])
quick = settings(max_examples=100, deadline=None)


@quick
@given(grids, blocks, boxes, boxes)
def test_sta_is_a_box_of_tiles_pushed_inside_at_the_edges(
    grid: TokenGrid, block: int, window: Place, tile: Place
) -> None:
    def sees(q: Place, k: Place) -> bool:
        for a, b, size, side, width in zip(q, k, grid.extent, tile, window, strict=True):
            last = -(-size // side) - 1
            seen = range(a // side - width // 2, a // side - width // 2 + width)
            while seen.start < 0:
                seen = range(seen.start + 1, seen.stop + 1)
            while seen.stop - 1 > last and seen.start > 0:
                seen = range(seen.start - 1, seen.stop - 1)
            if b // side not in seen:
                return False
        return True

    raster = places(grid)
    sequence = [raster[token] for token in grid.voxels(tile).order]
    mask = sta_mask(2, grid, block=block, window=[window], tile=tile)
    assert (mask.tiles == tiles(sequence, block, sees)).all()


def test_a_whole_number_of_tiles_keeps_exactly_the_window() -> None:
    grid = TokenGrid(30, 48, 80)
    for window, density in (((3, 3, 3), 0.09), ((5, 3, 3), 0.15), ((1, 6, 10), 0.20), ((5, 6, 1), 0.10)):
        assert sta_mask(1, grid, block=384, window=[window], tile=(6, 8, 8)).density == pytest.approx(density)


def test_heads_take_windows_of_the_set_and_some_are_dense() -> None:
    grid = TokenGrid(8, 16, 16)
    mask = sta_mask(24, grid, window=[(1, 1, 1), (1, 3, 3)], dense=0.1, seed=3)
    kept = sorted(mask.tiles.sum(axis=(1, 2)).tolist())
    everything = mask.q_blocks**2
    assert kept[-2:] == [everything] * 2
    assert set(kept[:-2]) == {mask.q_blocks, mask.q_blocks * 9}


@quick
@given(grids, blocks, shares)
def test_svg_is_the_narrowest_band_that_keeps_its_density(
    grid: TokenGrid, block: int, density: float
) -> None:
    def flat(place: Place) -> int:
        return (place[0] * grid.h + place[1]) * grid.w + place[2]

    for spatial, period in ((0.0, grid.frame), (1.0, grid.video)):
        mask = svg_mask(2, grid, block=block, density=density, spatial=spatial)
        for band in range(period):
            wanted = tiles(
                places(grid),
                block,
                lambda q, k: abs(flat(q) % period - flat(k) % period) <= band,  # noqa: B023
            )
            if wanted.mean() >= density:
                break
        assert (mask.tiles == wanted).all()


@quick
@given(grids, blocks, st.sampled_from([0.2, 0.95, 3.0]), st.sampled_from([0, 0.5, 1]), st.integers(0, 2))
def test_radial_bands_halve_with_every_doubling(
    grid: TokenGrid, block: int, decay: float, near: float, sink: int
) -> None:
    def sees(q: Place, k: Place) -> bool:
        apart = abs(q[0] - k[0])
        if apart == 0 or k[0] < sink:
            return True
        between = abs((q[1] * grid.w + q[2]) - (k[1] * grid.w + k[2]))
        if apart == 1:
            return between <= near * grid.frame
        halved = grid.frame / 2 ** apart.bit_length()
        thinned = 1
        while thinned * halved < block:
            thinned *= 2
        return apart % thinned == 0 and between <= max(block, decay * halved)

    mask = radial_mask(3, grid, block=block, decay=decay, near=near, sink=sink)
    assert (mask.tiles == tiles(places(grid), block, sees)).all()
    assert len(mask.patterns) == 1


@settings(max_examples=30, deadline=None)
@given(
    st.builds(TokenGrid, st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(0, 4)),
    st.sampled_from([1, 3, 8]),
    shares,
)
def test_paro_keeps_what_is_near_once_the_grid_is_turned(grid: TokenGrid, block: int, density: float) -> None:
    turned: list[BoolArray] = []
    for axes in permutations((0, 1, 2)):
        own = grid.turned(*axes)

        def distance(q: Place, k: Place, own: TokenGrid = own) -> int:
            within = abs((q[1] * own.w + q[2]) - (k[1] * own.w + k[2]))
            return abs(q[0] - k[0]) * own.frame + within * own.t

        reached = sorted({distance(q, k) for q in places(own) for k in places(own) if q and k})
        for reach in reached:
            kept = tiles(places(own), block, lambda q, k: distance(q, k) <= reach)  # noqa: B023
            if kept.mean() >= density:
                break
        turned.append(kept)
    mask = paro_mask(12, grid, block=block, density=density, cv=0)
    for head in mask.tiles:
        assert any((head == kept).all() for kept in turned)


def test_paro_heads_differ_in_turn_and_in_density() -> None:
    grid = TokenGrid(5, 16, 23)
    even = paro_mask(40, grid, cv=0)
    assert 3 <= len(even.patterns) <= 6
    spread = paro_mask(40, grid, density=0.3, cv=0.4).tiles.mean(axis=(1, 2))
    assert spread.mean() == pytest.approx(0.3, abs=0.06)
    assert 0.25 < spread.std() / spread.mean() < 0.6


@pytest.mark.parametrize("make", [sta_mask, svg_mask, paro_mask])
def test_the_seed_decides(make) -> None:
    grid = TokenGrid(5, 17, 19, prefix=3)
    options = {"window": [(1, 1, 1), (3, 3, 3), (2, 5, 1)]} if make is sta_mask else {}
    assert make(24, grid, seed=5, **options) == make(24, grid, seed=5, **options)
    assert make(24, grid, seed=5, **options) != make(24, grid, seed=6, **options)


def test_svg_mixes_its_two_kinds_as_asked() -> None:
    mask = svg_mask(10, TokenGrid(7, 11, 13), block=16, spatial=0.3)
    assert sorted(np.bincount(mask.pattern_of).tolist()) == [3, 7]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda grid: sta_mask(2, grid, window=[(0, 3, 3)]),
        lambda grid: sta_mask(2, grid, window=[(3, 3)]),  # type: ignore[list-item]
        lambda grid: sta_mask(2, grid, window=[]),
        lambda grid: sta_mask(2, grid, dense=1.2),
        lambda grid: sta_mask(2, grid, tile=(0, 4, 4)),
        lambda grid: sta_mask(2, grid, block=0),
        lambda grid: svg_mask(2, grid, density=-0.1),
        lambda grid: svg_mask(2, grid, spatial=2),
        lambda grid: radial_mask(2, grid, decay=0),
        lambda grid: radial_mask(2, grid, sink=-1),
        lambda grid: paro_mask(2, grid, density=0.3, cv=9),
    ],
)
def test_what_makes_no_sense_is_said(wrong) -> None:
    with pytest.raises(InputError):
        wrong(TokenGrid(3, 5, 7))
