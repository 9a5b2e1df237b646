"""Balanced partitions through the whole spine: exact, proved by `verify`, and lighter on the busiest rank."""

import numpy as np
import pytest

from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.topology import Topology
from weft.masks.random import random_mask
from weft.plan.balance import ratio
from weft.plan.balanced import Balancer
from weft.plan.choose import build
from weft.plan.strategies import parse
from weft.schedule.measure import measure
from weft.schedule.verify import verify


def of(ranks: int, tokens: int, heads: int) -> Problem:
    layout = Layout.even(tokens, ranks)
    return Problem(batch=1, heads=heads, kv_heads=heads, head_dim=8, q=layout, kv=layout)


@pytest.mark.parametrize("name", ["ulysses", "usp:2x2", "ring", "gather", "gather:2x2"])
def test_balance_lightens_the_busiest_rank(name):
    density = np.linspace(0.05, 0.9, 6)
    tiles = np.random.default_rng(0).random((6, 48, 48)) < density[:, None, None]
    tiles[:, :5] = True  # text rows: all on one ring rank
    mask = BlockMask.from_tiles(tiles, q_len=48 * 16 - 5, kv_len=48 * 16 - 5, block_q=16)
    problem = of(4, mask.q_len, 6)
    natural, balanced = (measure(build(n, problem, mask)).imbalance for n in (name, f"{name}+balanced"))
    assert natural > 1.15
    assert balanced < 1.08


def test_one_dense_head_is_split():
    tiles = np.zeros((3, 32, 32), dtype=bool)
    tiles[:, np.arange(32), np.arange(32)] = True
    tiles[1] = True
    mask = BlockMask.from_tiles(tiles, q_len=32 * 8, kv_len=32 * 8, block_q=8)
    problem = of(4, mask.q_len, 3)
    schedule = build("ulysses+balanced", problem, mask)
    verify(schedule)
    assert measure(schedule).imbalance < 1.1
    assert measure(build("ulysses", problem, mask)).imbalance > 3


def test_uneven_dense_heads_are_split_too():
    problem = of(2, 240, 3)
    dense = BlockMask.dense(3, 240)
    assert measure(build("ulysses", problem, dense)).imbalance > 1.3
    schedule = build("ulysses+balanced", problem, dense)
    verify(schedule)
    assert measure(schedule).imbalance < 1.02


def test_heads_that_are_even_in_order_stay_in_order():
    mask = BlockMask.from_tiles(np.tile(np.eye(16), (6, 1, 1)), q_len=256, kv_len=256, block_q=16)
    balancer = Balancer(of(4, 256, 6), mask, Topology.local(4))
    assert balancer.heads(2, by_load=True) == balancer.heads(2, by_load=False)


def test_the_bound_of_whole_heads_holds_in_front_of_a_ring_too():
    tiles = np.zeros((3, 16, 16), dtype=bool)
    tiles[0], tiles[1:, 0] = True, True
    mask = BlockMask.from_tiles(tiles, q_len=256, kv_len=256, block_q=16)
    balancer = Balancer(of(4, 256, 3), mask, Topology.local(4))
    bounds = {name: balancer.bound(parse(name, 4)) for name in ("usp:2x2", "usp:2x2+cuts", "ring")}
    assert bounds == {"usp:2x2": pytest.approx(16 / 9), "usp:2x2+cuts": 1.0, "ring": 1.0}


def test_seconds_of_a_deal_add_up_to_the_work_of_its_schedule():
    mask = random_mask(5, 203, 203, block=16, density=0.4, seed=3)
    topology = Topology(devices=6, flops=1e9, tile_seconds=1e-6)
    problem = of(6, 203, 5)
    balancer = Balancer(problem, mask, topology)
    for name in ("usp:2x3", "usp:2x3+balanced", "ring+cuts"):
        strategy = parse(name, 6)
        work = measure(build(name, problem, mask, topology)).work
        pairs = balancer.assign(strategy).seconds.sum(axis=2)
        assert pairs.sum() == pytest.approx(sum(work) * 4 * 8 / 1e9 + int(mask.tiles.sum()) * 1e-6, rel=1e-2)
        ranks = [strategy.mesh.coordinate(rank) for rank in range(6)]
        mine = [pairs[at.get("ulysses", 0), at.get("ring", 0)] for at in ranks]
        assert ratio(np.round(np.array(mine) * 1e12)) == pytest.approx(
            measure(build(name, problem, mask, topology)).imbalance, rel=0.02
        )
