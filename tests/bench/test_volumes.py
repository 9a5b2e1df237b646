"""What ways to shard an ST-DiT send is what their schedules send."""

from dataclasses import replace

import pytest

from bench.volumes import exchange_seconds, stages_seconds, volumes
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.topology import Link, Topology
from weft.plan.choose import build
from weft.schedule.measure import measure
from weft.simulate.clusters import cluster
from weft.simulate.models import ModelSizes, model

SMALL = ModelSizes(name="small", layers=3, heads=2, head_dim=8, mlp=4)
BARE = Topology(flops=1e9, call_seconds=0.0)


@pytest.mark.parametrize("way", ["ulysses", "ring"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_volumes_are_those_of_the_schedules(way, ranks):
    layout = Layout.even(16, ranks)
    problem = Problem(batch=5, heads=8, kv_heads=8, head_dim=4, q=layout, kv=layout, dtype="bfloat16")
    report = measure(build(way, problem, BlockMask.dense(8, 16)))
    activation = 5 * 16 * 8 * 4 * 2
    assert all(report.sent(rank) == getattr(volumes(activation, ranks), way) for rank in range(ranks))


@pytest.mark.parametrize("ranks", [2, 3, 8, 13])
def test_volumes_by_formula(ranks):
    found = volumes(1.0, ranks)
    away = (ranks - 1) / ranks
    assert found == pytest.approx((8 * away, 2 * away, 4 * away / ranks, 2 * away / ranks))


def test_one_rank_sends_nothing():
    assert volumes(100.0, 1) == (0, 0, 0, 0)
    assert exchange_seconds(BARE, 100.0, 4) == 0


def test_an_exchange_between_machines_waits_for_the_network():
    near = Link(latency=1e-3, bandwidth=1e6)
    far = Link(latency=1e-2, bandwidth=1e6)
    one = Topology(devices=4, intra=near, inter=far)
    assert exchange_seconds(one, 3e6, 2) == pytest.approx(2e-3 + 3)
    two = Topology(machines=2, devices=2, intra=near, inter=far, nic_bandwidth=1e6)
    assert exchange_seconds(two, 3e6, 2) == pytest.approx(2e-2 + 2e6 / 5e5), "two thirds go over half a NIC"


def test_stages_share_out_what_they_do_not_attend():
    pair = replace(SMALL, attentions=2)
    grid, wide = (8, 4, 4), Link(latency=0.0, bandwidth=1e30)
    one = stages_seconds(pair, grid, BARE, "dsp")
    assert one == pytest.approx(4 * 16 * (8 * 16**2 + 16 * 8**2) / 1e9)
    eight = replace(BARE, devices=8, intra=wide)
    assert stages_seconds(pair, grid, eight, "dsp") == pytest.approx(one / 8)
    spatial, temporal = 4 * 16 * 16**2 / 1e9, 4 * 16 * 16 * 8**2 / 1e9
    # Two heads for eight ranks: one rank still has one.
    assert stages_seconds(pair, grid, eight, "ulysses") == pytest.approx(spatial + temporal / 2)
    assert stages_seconds(pair, grid, eight, "ring") == pytest.approx(spatial + temporal / 8)


def test_dsp_is_ahead_of_ulysses_by_what_it_does_not_send():
    size, topology = model("open-sora"), cluster("8xh800")
    ulysses, dsp = (stages_seconds(size, size.grid(), topology, way) for way in ("ulysses", "dsp"))
    sent = volumes(2 * 80 * 1024 * size.hidden, 8)
    more = exchange_seconds(topology, sent.ulysses, 4) - exchange_seconds(topology, sent.dsp, 2)
    assert ulysses - dsp == pytest.approx(more)
