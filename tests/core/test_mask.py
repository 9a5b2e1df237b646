"""Block masks: the token mask they stand for, and its algebra."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases, token_mask
from weft.core.errors import InputError
from weft.core.indices import Indices
from weft.core.mask import BlockMask

masks = cases(max_tokens=97).map(lambda case: case.mask)


def of(tiles, q_len=19, kv_len=11, block_q=7, block_k=5):
    return BlockMask.from_tiles(tiles, q_len=q_len, kv_len=kv_len, block_q=block_q, block_k=block_k)


def random_tiles(seed: int, heads: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).random((heads, 3, 3)) < 0.5


@given(st.integers(0, 99))
def test_tiles_come_back_as_they_were_given(seed):
    tiles = random_tiles(seed)
    assert (of(tiles).tiles == tiles).all()
    assert of(tiles) == of(tiles.copy())
    assert hash(of(tiles)) == hash(of(tiles.copy()))


@given(st.integers(0, 99), st.integers(0, 99))
def test_and_or_are_those_of_the_tiles(a, b):
    x, y = random_tiles(a), random_tiles(b)
    assert of(x) & of(y) == of(x & y)
    assert of(x) | of(y) == of(x | y)


@given(masks)
def test_density_is_the_active_share_of_token_pairs_with_ragged_blocks_too(mask):
    assert mask.density == pytest.approx(token_mask(mask).mean(), abs=1e-12)
    assert mask.is_dense == token_mask(mask).all()


@given(masks, st.data())
def test_needed_agrees_with_the_token_mask(mask, data):
    heads, q_tokens = (
        Indices.of(data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=5)))
        for size in (mask.heads, mask.q_len)
    )
    part = token_mask(mask)[np.ix_(heads.array, q_tokens.array)]
    assert (mask.needed(heads, q_tokens) == part.any(axis=(0, 1))[:: mask.block_k]).all()


@given(masks, st.data())
def test_select_takes_heads_rows_and_columns_of_blocks(mask, data):
    chosen = [
        Indices.of(data.draw(st.sets(st.integers(0, size - 1), max_size=4))) for size in mask.tiles.shape
    ]
    assert (mask.select(*chosen) == mask.tiles[np.ix_(*(c.array for c in chosen))]).all()


@given(masks)
def test_block_sizes_add_up_to_the_true_length(mask):
    assert (mask.row_sizes.sum(), mask.col_sizes.sum()) == (mask.q_len, mask.kv_len)
    assert (mask.row_sizes[:-1] == mask.block_q).all()


def test_heads_with_equal_patterns_share_one():
    tiles = np.stack([random_tiles(0, 1)[0], random_tiles(1, 1)[0]])[[0, 1, 1, 0, 1]]
    assert of(tiles).pattern_of == (0, 1, 1, 0, 1)
    assert of(tiles).bits.shape[0] == 2


def test_patterns_are_told_apart_by_any_of_their_rows():
    """Heads that differ in the middle row are known without a look at others; the rest must not be."""
    tiles = np.zeros((3, 3, 3), dtype=bool)
    tiles[1, 0, 0] = tiles[2, 2, 2] = True
    assert of(tiles).pattern_of == (0, 1, 2) and np.array_equal(of(tiles).tiles, tiles)
    tiles[:, 1, :2] = [[0, 0], [0, 1], [1, 0]]
    assert of(tiles).pattern_of == (0, 1, 2) and np.array_equal(of(tiles).tiles, tiles)
    assert of(tiles[[0, 1, 0]]).pattern_of == (0, 1, 0)


def test_dense_is_one_tile_or_blocks():
    assert BlockMask.dense(3, 19, 11).grid == (3, 19, 11, 19, 11)
    assert BlockMask.dense(3, 19).grid == (3, 19, 19, 19, 19)
    assert BlockMask.dense(3, 19, 11, block=8).tiles.shape == (3, 3, 2)
    assert BlockMask.dense(3, 19, 11, block=8).is_dense


def test_masks_that_differ_in_anything_are_not_equal():
    tiles = random_tiles(0)
    other = [of(tiles, q_len=20), of(tiles, kv_len=12), of(~tiles), of(tiles[:2])]
    assert all(of(tiles) != mask and of(tiles).digest != mask.digest for mask in other)
    assert of(tiles) != "mask"


def test_bits_are_frozen():
    with pytest.raises(ValueError, match="read-only"):
        of(random_tiles(0)).bits[:] = 0


def test_a_mask_is_neither_true_nor_false():
    with pytest.raises(InputError, match="no truth value. Use mask.is_dense or mask.density"):
        bool(BlockMask.dense(1, 3))


def test_repr_says_heads_tokens_blocks_and_density():
    assert repr(BlockMask.dense(1, 19, 11, block=8)) == (
        "BlockMask(1 heads, 19×11 tokens, blocks 8×8, 100.0% active)"
    )
    assert "(3 heads (1 patterns)," in repr(BlockMask.dense(3, 19))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: of(np.ones((2, 3, 2))), r"\(2, 3, 2\) do not fit 19 × 11.*Expected \[heads, 3, 3\]"),
        (lambda: of(np.ones((3, 3))), "do not fit"),
        (lambda: of(np.ones((0, 3, 3))), "pattern"),
        (
            lambda: of(np.ones((1, 3, 3))) & of(np.ones((1, 3, 3)), q_len=20),
            "must have equal heads",
        ),
        (
            lambda: of(np.ones((1, 3, 3))) | of(np.ones((2, 3, 3))),
            "must have equal heads",
        ),
        (
            lambda: BlockMask(5, 5, 5, 5, (0,), np.zeros((1, 1, 2), np.uint8)),
            r"got uint8 of shape \(1, 1, 2\)",
        ),
        (lambda: BlockMask(5, 5, 5, 5, (0,), np.zeros((1, 1, 1), np.int64)), "must be uint8 .* got int64"),
        (lambda: BlockMask(5, 5, 5, 5, (1,), np.zeros((1, 1, 1), np.uint8)), "does not name 1 patterns"),
        (lambda: BlockMask(0, 5, 5, 5, (0,), np.zeros((1, 0, 1), np.uint8)), "0 × 5 tokens"),
        (
            lambda: BlockMask(5, 5, 5, 0, (0,), np.zeros((1, 1, 1), np.uint8)),
            "5 × 5 tokens, blocks of 5 × 0",
        ),
    ],
)
def test_bad_masks_say_which_rule_they_break(make, words):
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: BlockMask.dense(1, 0),
        lambda: BlockMask.dense(1, 5, 0),
        lambda: BlockMask.dense(1, 5, block=0),
        lambda: of(np.ones((1, 3, 3)), block_q=0),
        lambda: of(np.ones((1, 3, 2)), block_k=0),
    ],
)
def test_nothing_is_not_a_length(make):
    with pytest.raises(InputError):
        make()


def test_runs_of_heads_are_those_of_which_nothing_is_left_out():
    tiles = np.zeros((7, 2, 3), dtype=bool)
    tiles[[1, 2, 5]] = True
    mask = BlockMask.from_tiles(tiles, q_len=8, kv_len=12, block_q=4, block_k=4)
    assert mask.head_runs(Indices.span(0, 7)) == (
        (0, 1, False), (1, 3, True), (3, 5, False), (5, 6, True), (6, 7, False),
    )  # fmt: skip
    assert mask.head_runs(Indices.of([1, 5])) == ((0, 2, False),), "one run is one call"
    many = BlockMask.from_tiles(tiles[[0, 1] * 9], q_len=8, kv_len=12, block_q=4, block_k=4)
    assert len(many.head_runs(Indices.span(0, 18))) == 1
