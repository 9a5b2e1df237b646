"""Rows of heads go through the planner, and no step is planned from its own counts but the first."""

import numpy as np
import pytest

from bench import heads
from weft.plan.balance import ratio
from weft.plan.counts import TileCost, head_loads
from weft.plan.heads import group_loads, refined


def counts(steps=4, layers=2, seed=0):
    rng = np.random.default_rng(seed)
    drift = np.exp(rng.normal(0, 0.1, (steps, layers, 40)).cumsum(axis=0))
    base = rng.uniform(5_000, 60_000, (1, layers, 40))
    return np.clip(base * drift, 1, heads.Q_BLOCKS * heads.KV_BLOCKS).astype(np.int64)


def test_a_mask_has_as_many_tiles_as_are_counted():
    given = np.array([0, 1, 1022, 53_630, heads.Q_BLOCKS * heads.KV_BLOCKS])
    assert head_loads(heads.mask_of(given), TileCost(pair=0, tile=1)).tolist() == given.tolist()


def test_the_last_step_cannot_be_known_before(tmp_path):
    given = counts()
    other = given.copy()
    other[-1] = given[-1][:, ::-1]
    (first, _), (second, _) = (
        heads.replay(each, str(tmp_path / name)) for name, each in (("a", given), ("b", other))
    )
    assert first.shape == (4, 2) and np.array_equal(first[:-1], second[:-1])
    assert first[0].max() < 1.03  # planned from its own mask
    assert second[-1].min() > 1.1  # planned from the step before, which it is unlike


def test_a_stored_run_is_a_prior_and_a_clean_folder_is_none(tmp_path):
    given = counts(seed=1)
    alone, _ = heads.replay(given, str(tmp_path / "a"))
    again, _ = heads.replay(given, str(tmp_path / "a"))
    assert again[1:].mean() < alone[1:].mean()  # the same run again: nothing is unknown
    assert np.array_equal(heads.replay(given, str(tmp_path / "b"))[0], alone)


def test_persistence_is_the_step_before():
    given = counts()
    found = heads.persistence(given)
    assert found[0, 1] == ratio(group_loads(refined(given[0, 1], 8), given[0, 1]))
    assert found[2, 1] == ratio(group_loads(refined(given[1, 1], 8), given[2, 1]))


def test_known_counts_need_few_cuts_to_hold():
    row = heads._ratio("case", 1.001, ("peer", 1.01), 1.0, 1.0015, ", ≤ 0.5 cuts", also=False)
    assert not row.holds and row.bar == "≤ 1001.5 ‰, ≤ 0.5 cuts"
    assert heads._ratio("case", 1.001, ("peer", 1.01), 1.0, 1.0015).holds
    assert heads.known(counts())[0].measured == pytest.approx(1000, abs=3)
