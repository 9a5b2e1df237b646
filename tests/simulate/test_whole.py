"""Whole models: each part of a step is its arithmetic, and shares out over ranks."""

from dataclasses import replace

import pytest

from weft.core.topology import Topology
from weft.simulate.model_step import step
from weft.simulate.models import ModelSizes

SMALL = ModelSizes(name="small", layers=3, heads=2, head_dim=8, mlp=4)
GRID = (5, 3, 7)
BARE = Topology(flops=1e9, call_seconds=0.0)


def test_without_attention_a_step_is_its_linear_layers():
    expected = 3 * 2 * 105 * 12 * 16**2 / 1e9
    assert step(SMALL, GRID, 0.0, BARE).seconds == pytest.approx(expected, rel=1e-12)
    assert step(SMALL, GRID, 0.0, BARE, linear_flops=2e9).seconds == pytest.approx(expected / 2, rel=1e-12)


def test_attention_comes_once_a_layer():
    more = step(SMALL, GRID, 0.25, BARE).seconds - step(SMALL, GRID, 0.0, BARE).seconds
    assert more == pytest.approx(3 * 0.25)


def test_cross_attention_has_its_pairs_and_its_weights():
    crossed = step(replace(SMALL, cross=11), GRID, 0.0, BARE)
    assert crossed.cross == pytest.approx(3 * 4 * 105 * 11 * 16 / 1e9)
    text = 2 * 16**2 * 11
    assert crossed.linear == pytest.approx(3 * 2 * (14 * 16**2 * 105 + text) / 1e9)


def test_memory_takes_time_where_it_has_a_speed():
    assert step(SMALL, GRID, 0.0, BARE).elementwise == 0
    slow = step(SMALL, GRID, 0.0, replace(BARE, memory_bandwidth=1e6))
    assert slow.elementwise == pytest.approx(3 * (19 + 11 + 2 * 4) * 105 * 16 * 2 / 1e6)
    assert slow.seconds == pytest.approx(slow.linear + slow.elementwise)


@pytest.mark.parametrize("ranks", [1, 3, 7, 8, 200])
def test_the_slowest_rank_has_its_rows_and_all_text(ranks):
    rows = -(-105 // ranks)
    found = step(replace(SMALL, text=4), GRID, 0.0, replace(BARE, devices=ranks)).linear
    assert found == pytest.approx(3 * 2 * (rows + 4) * 12 * 16**2 / 1e9)
