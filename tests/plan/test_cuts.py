"""Contiguous cuts are the best there are, and leave locality alone."""

from itertools import combinations_with_replacement

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.blocks import needed_fraction
from bench.deals import contiguous
from weft.core.errors import InputError
from weft.masks.grid import TokenGrid
from weft.masks.sta import sta_mask
from weft.masks.svg import svg_mask
from weft.plan.balance import ratio
from weft.plan.counts import row_loads
from weft.plan.cuts import cut


def best(loads: list[int], ring: int, most: int) -> int:
    """The least largest load over all contiguous cuts with at most so many blocks a rank."""
    cuts = combinations_with_replacement(range(len(loads) + 1), ring - 1)
    runs = ([0, *inner, len(loads)] for inner in cuts)
    pairs = (list(zip(run, run[1:], strict=False)) for run in runs)
    return min(max(sum(loads[a:b]) for a, b in pair) for pair in pairs if max(b - a for a, b in pair) <= most)


@settings(max_examples=200, deadline=None)
@given(
    loads=st.lists(st.integers(0, 20), min_size=1, max_size=9),
    ring=st.integers(1, 4),
    cap=st.sampled_from([1.0, 1.3, 2.0, 9.0]),
)
def test_no_contiguous_cut_is_better(loads, ring, cap):
    most = max(int(cap * len(loads) / ring), -(-len(loads) // ring))
    found = cut(loads, ring, cap=cap)
    assert (np.diff(found) >= 0).all() and found.min() >= 0 and found.max() < ring
    assert np.bincount(found).max() <= most
    assert np.bincount(found, weights=loads).max() == best(loads, ring, most)


@pytest.mark.parametrize(("blocks", "ring"), [(37, 5), (3, 8), (1, 1), (592, 8), (13, 2)])
def test_loads_that_do_not_matter_leave_counts_even(blocks, ring):
    even = np.bincount(contiguous(blocks, ring), minlength=ring)
    for loads in (np.zeros(blocks, dtype=int), np.ones(blocks, dtype=int)):
        counts = np.bincount(cut(loads, ring), minlength=ring)
        assert sorted(counts) == sorted(even)


@pytest.mark.parametrize(
    ("loads", "ring", "cap"), [([1, -1], 2, 1.5), ([[1]], 2, 1.5), ([1], 0, 1.5), ([1], 2, 0.9)]
)
def test_what_cannot_be_cut(loads, ring, cap):
    with pytest.raises(InputError, match="Cannot cut"):
        cut(loads, ring, cap=cap)


GRID = TokenGrid(12, 24, 24)


@pytest.mark.parametrize("ring", [2, 4, 5, 8])
@pytest.mark.parametrize(
    "mask",
    [
        sta_mask(4, GRID, window=((3, 3, 3), (1, 5, 5))),
        svg_mask(4, GRID, spatial=1.0),
        svg_mask(4, GRID, spatial=1.0, density=0.1),
    ],
    ids=["sta", "spatial", "narrow"],
)
def test_locality_stays(mask, ring):
    even = contiguous(mask.q_blocks, ring)
    loads = row_loads(mask).sum(axis=0)
    found = cut(loads, ring)
    assert needed_fraction(mask, found, even) <= 1.1 * needed_fraction(mask, even, even)
    per_rank = [np.bincount(rows, weights=loads, minlength=ring) for rows in (found, even)]
    assert ratio(per_rank[0]) <= ratio(per_rank[1])
