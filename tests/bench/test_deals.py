"""What weft is compared with deals as it was published."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.blocks import needed_fraction
from bench.deals import DbspPolicy, dbsp_blocks, snake
from weft.core.mask import BlockMask
from weft.plan.heads import group_loads, natural


def test_snake_goes_there_and_back():
    assert snake([1, 2, 3, 4, 5, 6, 7], 3) == ((0, 1, 6), (2, 5), (3, 4))
    assert snake([9, 8, 7, 6, 5], 2) == ((0, 3, 4), (1, 2))


def test_dbsp_blocks_by_hand():
    """Rows 5 4 3 1 at homes 0 0 1 1: by load alone 5 | 4 3 | 1, and with the reward 5 and 4 stay."""
    tiles = np.array([[[5], [4], [3], [1]]])
    assert dbsp_blocks(tiles, 2, reward=0)[0].tolist() == [[0, 1, 1, 0]]
    assert dbsp_blocks(tiles, 2, reward=2)[0].tolist() == [[0, 0, 1, 1]]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.integers(1, 9), st.sampled_from([0, 2, 10]))
def test_dbsp_blocks_have_equal_counts_and_one_permutation(seed, ring, reward):
    tiles = np.random.default_rng(seed).integers(50, size=(3, 11, 7))
    for groups in dbsp_blocks(tiles, ring, reward=reward):
        counts = np.bincount(groups[0], minlength=ring)
        assert (groups == groups[0]).all() and counts.max() - counts.min() <= 1


def test_the_policy_plans_all_layers_or_none():
    fits, drifts, worse = [5, 5, 5, 5], [57, 58, 43, 42], [70, 80, 20, 30]
    policy = DbspPolicy([natural(4, 2)] * 2)
    assert policy.observe([fits, drifts]) == (natural(4, 2),) * 2  # 1.15 in one, 1.075 in the mean
    first, second = policy.observe([fits, worse])
    assert first == ((0, 2), (1, 3)) and group_loads(second, worse).tolist() == [100, 100]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), ring=st.integers(1, 5), q=st.integers(1, 30), kv=st.integers(1, 30))
def test_needed_fraction_is_that_of_the_unpacked_mask(seed, ring, q, kv):
    rng = np.random.default_rng(seed)
    tiles = rng.random((3, q, kv)) < 0.1
    mask = BlockMask.from_tiles(tiles, q_len=q, kv_len=kv, block_q=1)
    rows, cols = rng.integers(ring, size=q), rng.integers(ring, size=kv)
    shares = []
    for rank in range(max(rows.max(), cols.max()) + 1):
        remote = [j for j in range(kv) if cols[j] != rank]
        read = [j for j in remote if tiles[:, rows == rank, j].any()]
        shares.append(len(read) / len(remote) if remote else 0)
    assert needed_fraction(mask, rows, cols) == pytest.approx(np.mean(shares))
