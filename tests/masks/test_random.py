"""Random masks and the laws over heads."""

from __future__ import annotations

import numpy as np
import pytest

from weft.core.errors import InputError
from weft.masks.random import random_mask
from weft.masks.synthetic import chosen_heads, drift, head_densities


def test_a_density_is_kept_on_any_length() -> None:
    mask = random_mask(8, 997, 1501, block=16, density=0.3)
    assert (mask.q_len, mask.kv_len, mask.heads) == (997, 1501, 8)
    assert mask.density == pytest.approx(0.3, abs=0.01)
    assert random_mask(8, 997, 1501, block=16, density=0.3) == mask
    assert random_mask(8, 997, 1501, block=16, density=0.3, seed=1) != mask


def test_a_list_is_one_density_a_head() -> None:
    tiles = random_mask(3, 2048, 2048, block=16, density=[0, 0.4, 1]).tiles.mean(axis=(1, 2))
    assert tiles == pytest.approx([0, 0.4, 1], abs=0.02)


@pytest.mark.parametrize(("mean", "cv"), [(0.3, 0.5), (0.15, 0.8), (0.7, 0.2)])
def test_a_cv_spreads_densities_by_a_beta_law(mean: float, cv: float) -> None:
    law = head_densities(40000, mean, cv=cv, seed=2)
    assert law.mean() == pytest.approx(mean, rel=0.02)
    assert law.std() / law.mean() == pytest.approx(cv, rel=0.02)
    assert law.min() >= 0
    assert law.max() <= 1
    assert (law != head_densities(40000, mean, cv=cv, seed=3)).all()


def test_a_share_of_heads_is_whole_heads() -> None:
    assert chosen_heads(24, 0.1, name="dense", seed=0).sum() == 2
    assert chosen_heads(3, 1, name="dense", seed=0).all()
    assert not chosen_heads(3, 0, name="dense", seed=0).any()


def test_a_drift_keeps_its_deviation_and_forgets_slowly() -> None:
    walk = np.array([drift((4000,), step=step, rho=0.9, seed=[7]) for step in range(8)])
    assert walk.std(axis=1) == pytest.approx(1, abs=0.05)
    for step, past in enumerate(walk):
        assert np.corrcoef(walk[0], past)[0, 1] == pytest.approx(0.9**step, abs=0.05)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"density": 1.5}, "density must be in \\[0, 1\\], got 1.5"),
        ({"density": float("nan")}, "density must be in .*, got nan"),
        ({"density": [0.1, 0.2]}, "one number or 3, one for each head, got 2"),
        ({"density": 0.5, "cv": 1.0}, "cv must be in \\[0, 1.00\\)"),
        ({"density": 0.5, "cv": -1}, "cv must be .* got -1"),
    ],
)
def test_what_is_no_law_is_said(options, said: str) -> None:
    with pytest.raises(InputError, match=said):
        random_mask(3, 64, 64, **options)
