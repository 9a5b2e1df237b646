"""The padded lists that block-sparse packages read, on real tensors: nothing in the packages checks them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.run.kernels.lists import PaddedLists, block_sizes, padded_lists
from weft.run.kernels.tiles import Blocks, Tiles

CPU = torch.device("cpu")


@st.composite
def masks(draw: st.DrawFn) -> np.ndarray:
    shape = tuple(draw(st.integers(1, 6)) for _ in range(3))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    return random.random(shape) < draw(st.sampled_from((0.0, 0.2, 0.6, 1.0)))


def tiles_of(active: np.ndarray, *, on_device: bool = False) -> Tiles:
    """Tiles of blocks of 4 with ragged ends, known on the host or only as lists of a device."""
    _, rows, columns = active.shape
    sizes = 4, 4, 4 * rows - 1, 4 * columns - 3
    return Tiles(None, *sizes, listed=Blocks.of(active)) if on_device else Tiles(active, *sizes)


def entries(lists: PaddedLists) -> list[list[int]]:
    """The blocks of every (batch, head, row)."""
    flat = lists.index.flatten(0, 2)
    return [row[:count].tolist() for row, count in zip(flat, lists.counts.flatten().tolist(), strict=True)]


@given(active=masks(), on_device=st.booleans(), batch=st.integers(1, 3), inverted=st.booleans())
def test_lists_are_the_mask_strictly_ascending(
    active: np.ndarray, on_device: bool, batch: int, inverted: bool
) -> None:
    lists = padded_lists(tiles_of(active, on_device=on_device), CPU, batch=batch, inverted=inverted)
    rows = active.swapaxes(1, 2) if inverted else active
    assert entries(lists) == [np.flatnonzero(row).tolist() for head in rows for row in head] * batch
    assert lists.counts.shape == (batch, *rows.shape[:2])
    assert lists.index.shape[:3] == lists.counts.shape
    assert {lists.counts.dtype, lists.index.dtype} == {torch.int32}
    assert lists.index.is_contiguous()
    assert lists.counts.is_contiguous()


@given(active=masks())
def test_the_backward_has_the_exact_transpose(active: np.ndarray) -> None:
    tiles = tiles_of(active)
    pairs = []
    for inverted in (False, True):
        lists = padded_lists(tiles, CPU, inverted=inverted)
        rows = lists.counts.shape[2]
        found = {(at // rows, at % rows, other) for at, row in enumerate(entries(lists)) for other in row}
        pairs.append({(head, *reversed(pair)) for head, *pair in found} if inverted else found)
    assert pairs[0] == pairs[1]


@given(active=masks(), on_device=st.booleans())
def test_what_is_behind_a_count_is_a_block_that_exists(active: np.ndarray, on_device: bool) -> None:
    lists = padded_lists(tiles_of(active, on_device=on_device), CPU)
    assert 1 <= lists.index.shape[3] <= active.shape[2]
    assert lists.index.min() >= 0
    assert lists.index.max() < active.shape[2]


@given(active=masks())
def test_a_list_of_the_host_is_as_wide_as_its_longest_row(active: np.ndarray) -> None:
    lists = padded_lists(tiles_of(active), CPU)
    assert lists.index.shape[3] == max(1, active.sum(2).max())
    assert lists.has_empty == (not active.any(2).all())
    assert padded_lists(tiles_of(active, on_device=True), CPU).has_empty


def test_lists_are_made_once_for_each_batch_and_direction() -> None:
    tiles = tiles_of(np.eye(3, dtype=bool)[None])
    lists = padded_lists(tiles, CPU)
    assert padded_lists(tiles, CPU) is lists
    assert padded_lists(tiles, CPU, batch=2) is not lists
    assert padded_lists(tiles, CPU, inverted=True) is not lists


@pytest.mark.parametrize(("keys", "sizes"), [(12, None), (9, [4, 4, 1]), (3, [3])])
def test_a_ragged_block_has_its_size(keys: int, sizes: list[int] | None) -> None:
    found = block_sizes(Tiles(np.ones((1, 1, -(-keys // 4)), dtype=bool), 4, 4, 4, keys), CPU)
    assert (found if found is None else found.tolist()) == sizes
    assert found is None or found.dtype == torch.int32
