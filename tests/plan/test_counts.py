"""Counting on packed bits gives what the unpacked booleans give, tile by tile."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.plan import counts
from weft.plan.counts import TileCost, head_loads, row_loads, tile_loads

COSTS = (TileCost(), TileCost(pair=0, tile=1), TileCost(pair=3, tile=70))


@st.composite
def masks(draw: st.DrawFn) -> BlockMask:
    """Any lengths and blocks, ragged or not, heads that share patterns, some of them empty or full."""
    q_len, kv_len = draw(st.integers(1, 200)), draw(st.integers(1, 200))
    block_q, block_k = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    shape = draw(st.integers(1, 9)), -(-q_len // block_q), -(-kv_len // block_k)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    patterns = rng.random(shape) < rng.choice([0, 0.1, 0.5, 1], size=(shape[0], 1, 1))
    tiles = patterns[rng.integers(shape[0], size=draw(st.integers(1, 20)))]
    return BlockMask.from_tiles(tiles, q_len=q_len, kv_len=kv_len, block_q=block_q, block_k=block_k)


def naive(mask: BlockMask, cost: TileCost) -> np.ndarray:
    """[heads, q blocks, kv blocks]."""
    return mask.tiles * (mask.row_sizes[:, None] * mask.col_sizes * cost.pair + cost.tile)


@settings(max_examples=150, deadline=None)
@given(mask=masks(), cost=st.sampled_from(COSTS), data=st.data())
def test_loads_are_those_of_the_unpacked_mask(mask, cost, data):
    expected = naive(mask, cost)
    assert np.array_equal(head_loads(mask, cost), expected.sum(axis=(1, 2)))
    assert np.array_equal(row_loads(mask, cost), expected.sum(axis=2))
    group = st.lists(st.integers(0, mask.heads - 1), max_size=mask.heads)
    groups = data.draw(st.lists(group, min_size=1, max_size=4))
    found = tile_loads(mask, groups, cost)
    assert found.dtype == np.int64
    assert np.array_equal(found, [expected[heads].sum(axis=0) for heads in groups])


def test_more_heads_than_a_byte_counts():
    rng = np.random.default_rng(0)
    tiles = rng.random((7, 5, 11))[rng.integers(7, size=700)] < 0.5
    mask = BlockMask.from_tiles(tiles, q_len=33, kv_len=77, block_q=7)
    assert np.array_equal(tile_loads(mask, [range(700)])[0], naive(mask, TileCost()).sum(axis=0))
    one = BlockMask.dense(65_537, 4, block=2)
    assert (tile_loads(one, [range(65_537)]) == 4 * 65_537).all()


@pytest.mark.parametrize("cost", COSTS)
def test_without_bitwise_count(monkeypatch, cost):
    """NumPy 1 has none."""
    tiles = np.random.default_rng(0).random((3, 13, 29)) < 0.4
    mask = BlockMask.from_tiles(tiles, q_len=100, kv_len=230, block_q=8)
    expected = head_loads(mask, cost), row_loads(mask, cost)
    monkeypatch.delattr(counts.np, "bitwise_count", raising=False)
    assert np.array_equal(head_loads(mask, cost), expected[0])
    assert np.array_equal(row_loads(mask, cost), expected[1])


@pytest.mark.parametrize("costs", [(-1, 2), (1, -1), (0, 0)])
def test_work_is_not_free(costs):
    with pytest.raises(InputError, match="one of them > 0, got"):
        TileCost(*costs)
