"""Masks that are chosen by score: what is kept of each row, and how masks drift over steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.core.errors import InputError
from weft.core.indices import split_evenly
from weft.core.mask import BoolArray
from weft.masks.evolving import evolving_mask
from weft.masks.grid import TokenGrid
from weft.masks.scores import top_k, top_p
from weft.masks.sparge import sparge_mask, top_p_mask
from weft.masks.vsa import top_k_mask, vsa_mask
from weft.plan.balance import step_ratio

GRID = TokenGrid(7, 17, 19, prefix=70, suffix=3)
# Few distinct values: ties are the rule.
rows = st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=1, max_size=4)


@settings(deadline=None)
@given(rows, st.integers(1, 5))
def test_top_k_keeps_the_first_of_equals(scores: list[list[int]], k: int) -> None:
    for row, kept in zip(scores, top_k(np.array(scores, dtype=np.float32), k), strict=True):
        best = sorted(range(5), key=lambda at: (-row[at], at))[:k]
        assert np.flatnonzero(kept).tolist() == sorted(best)


@settings(deadline=None)
@given(rows, st.sampled_from([0.0, 0.31, 0.5, 0.77, 0.93, 1.0]))
def test_top_p_keeps_the_fewest_that_reach_p_and_their_equals(scores: list[list[int]], p: float) -> None:
    for row, kept in zip(scores, top_p(np.array(scores, dtype=np.float32), p), strict=True):
        share = np.exp(row) / np.exp(row).sum()
        total = 0.0
        for least in sorted(share, reverse=True):
            total += least
            if total >= p - 1e-6:
                break
        assert kept.tolist() == (share >= least - 1e-9).tolist()


def test_vsa_keeps_as_much_in_every_row_and_all_text() -> None:
    mask = vsa_mask(6, GRID, density=0.2)
    text = GRID.text(64)
    assert mask.tiles[:, text].all()
    assert mask.tiles[:, :, text].all()
    kept = mask.tiles[:, ~text][:, :, ~text].sum(axis=2)
    assert (kept == round(0.2 * (~text).sum())).all()
    assert len(mask.patterns) == 6


def test_given_scores_decide() -> None:
    grid = TokenGrid(1, 4, 4)
    scores = np.random.default_rng(0).random((3, 4, 4), dtype=np.float32)
    best = scores.argmax(axis=2)
    one = top_k_mask(scores, grid, block=4, density=0.25).tiles
    assert (one.argmax(axis=2) == best).all()
    assert (one.sum(axis=2) == 1).all()
    assert (top_p_mask(scores * 1000, grid, block=4).tiles == one).all()
    assert top_p_mask(scores, grid, block=4, p=1.0).is_dense


def test_sparge_heads_differ_and_more_p_keeps_more() -> None:
    kept = {p: sparge_mask(40, GRID, p=p).tiles.mean(axis=(1, 2)) for p in (0.5, 0.9)}
    assert (kept[0.5] < kept[0.9]).all()
    assert 0.3 < kept[0.9].std() / kept[0.9].mean() < 1
    assert sparge_mask(4, GRID).tiles[:, GRID.text(64)].all()


@pytest.mark.parametrize("make", [vsa_mask, sparge_mask, evolving_mask])
def test_the_seed_decides_and_a_step_changes_a_little(make) -> None:
    grid = TokenGrid(5, 16, 16)
    first = make(8, grid, seed=1)
    assert first == make(8, grid, seed=1)

    def apart(other: BoolArray) -> float:
        return float((first.tiles != other).mean())

    next_step, later, stranger = (
        make(8, grid, **at).tiles for at in ({"seed": 1, "step": 1}, {"seed": 1, "step": 30}, {"seed": 2})
    )
    assert 0 < apart(next_step) < apart(later) < apart(stranger)


def natural(tiles: BoolArray, ulysses: int, ring: int) -> float:
    runs = split_evenly(tiles.shape[1], ring)
    loads = [
        [[tiles[h:i, a:b, c:d].sum() for c, d in runs] for a, b in runs]
        for h, i in split_evenly(len(tiles), ulysses)
    ]
    return step_ratio(np.array(loads))


def test_evolving_masks_are_as_dense_and_as_unbalanced_as_published_ones() -> None:
    grid = TokenGrid(16, 37, 64)
    found = [evolving_mask(40, grid, step=3 * seed, seed=seed).tiles for seed in range(10)]
    assert {tiles.shape for tiles in found} == {(40, 592, 592)}
    assert [tiles.mean() for tiles in found] == pytest.approx([0.47] * 10, abs=0.001)
    for cut, wanted in {(4, 2): 1.26, (2, 4): 1.17, (1, 8): 1.14}.items():
        assert np.mean([natural(tiles, *cut) for tiles in found]) == pytest.approx(wanted, abs=0.05)


def test_the_density_of_a_head_walks_slowly() -> None:
    grid = TokenGrid(4, 16, 16)
    density = np.array([evolving_mask(40, grid, step=step).tiles.mean(axis=(1, 2)) for step in range(30)])
    steps = [np.corrcoef(a, b)[0, 1] for a, b in zip(density, density[1:], strict=False)]
    assert np.mean(steps) == pytest.approx(0.97, abs=0.02)
    assert np.corrcoef(density[0], density[-1])[0, 1] < 0.85


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: vsa_mask(2, GRID, density=1.5),
        lambda: sparge_mask(2, GRID, p=-1),
        lambda: top_k_mask(np.ones((2, 3, 4), dtype=np.float32), GRID),
        lambda: top_p_mask(np.ones((2, 3, 3), dtype=np.float32), GRID),
        lambda: evolving_mask(2, GRID, density=1.0),
        lambda: evolving_mask(2, GRID, rho=1.5),
        lambda: evolving_mask(2, GRID, step=-1),
    ],
)
def test_what_makes_no_sense_is_said(wrong) -> None:
    with pytest.raises(InputError):
        wrong()
