"""The host of a device: it runs ahead, and what it cannot launch in time is waited for."""

from dataclasses import fields, replace

import pytest

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Host, Link, Topology
from weft.plan.balanced import Balancer
from weft.plan.choose import build, choose
from weft.plan.strategies import parse
from weft.simulate.clusters import cluster
from weft.simulate.events import simulate
from weft.simulate.gpus import GPU_HOST
from weft.simulate.predict import critical_path

FREE = Link(latency=0.0, bandwidth=1e30)
COSTS = [field.name for field in fields(Host)]


def devices(machines: int, each: int, **fields: object) -> Topology:
    """Devices that take no time, so that what is left is the host's."""
    free = Topology(machines=machines, devices=each, intra=FREE, inter=FREE, flops=1e30, call_seconds=0.0)
    return replace(free, **fields)


def schedule(name: str, topology: Topology, heads: int = 32, tokens: int = 2048) -> Schedule:
    layout = Layout.even(tokens, topology.ranks)
    problem = Problem(batch=1, heads=heads, kv_heads=heads, head_dim=64, q=layout, kv=layout)
    return build(name, problem, BlockMask.dense(heads, tokens), topology)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        # Ulysses: queries, keys and values go to all ranks, and outputs come back.
        ("ulysses", {"call": 1, "attend": 1, "collective": 2, "post": 0, "message": 0}),
        ("ring", {"call": 1, "attend": 8, "collective": 0, "post": 7, "message": 14}),
        # One peer on the Ulysses axis, there and back; three hops to a neighbor and from one.
        ("usp:2x4", {"call": 1, "attend": 4, "collective": 0, "post": 5, "message": 10}),
        ("gather", {"call": 1, "attend": 2, "collective": 1, "post": 0, "message": 0}),
    ],
)
def test_every_step_is_started_once(name, counts):
    for cost, count in counts.items():
        topology = devices(1, 8, host=Host(**{cost: 1.0}))
        assert simulate(schedule(name, topology), topology).seconds == pytest.approx(count, abs=1e-6), cost
        assert critical_path(schedule(name, topology), topology).seconds == pytest.approx(count, abs=1e-6), (
            cost
        )


def test_a_host_that_is_ahead_costs_nothing():
    topology = devices(1, 4, flops=1e9)
    plan = schedule("usp:2x2", topology)
    alone = simulate(plan, topology)
    behind = simulate(plan, replace(topology, host=GPU_HOST))
    assert behind.spans == alone.spans
    assert critical_path(plan, replace(topology, host=GPU_HOST)) == critical_path(plan, topology)


def test_a_host_that_is_behind_is_waited_for():
    topology = devices(1, 4, flops=1e12)
    plan = schedule("ring", topology)
    device = simulate(plan, topology).seconds
    found = simulate(plan, replace(topology, host=Host(attend=0.375 * device)))
    assert found.seconds == pytest.approx(1.5 * device)
    late = [span for span in found.spans if span.kind == "launch"]
    assert [(span.rank, span.lane, span.start, span.end) for span in late] == [
        (rank, "compute", device, 1.5 * device) for rank in range(4)
    ]
    assert found.computing.tolist() == simulate(plan, topology).computing.tolist()


@pytest.mark.parametrize(
    "name",
    ["ulysses", "ring", "usp:8x4", "swapped:4x8", "gather", "gather:8x4", "torus:8x4", "torus:8x4d0"]
    + ["torus:32x1", "torus:8x4c2", "torus:4x8c2d3"],
)
def test_the_closed_form_and_the_cheap_predictor_count_the_same_launches(name):
    """A plan that launches decide must not be left out, or let in, by what only guesses them."""
    topology = devices(4, 8, host=GPU_HOST)
    plan = schedule(name, topology)
    found = simulate(plan, topology).seconds
    balancer = Balancer(plan.attention[0], plan.attention[1], topology)
    strategy = parse(name, 32)
    guessed = strategy.estimate(plan.attention[0], topology, balancer.assign(strategy))
    assert guessed == pytest.approx(found, rel=0.12)
    assert critical_path(plan, topology).seconds == pytest.approx(found, rel=0.12)


def test_a_plan_that_is_bound_by_launches_loses():
    """Flux on two machines: a torus hides what it sends, in more launches than its attention is worth."""
    topology = cluster("2x8xa100")
    layout = Layout.even(4608, 16, prefix=512)
    problem = Problem(batch=1, heads=24, kv_heads=24, head_dim=128, q=layout, kv=layout, dtype="bfloat16")
    mask = BlockMask.dense(24, 4608)
    without = choose(problem, mask, replace(topology, host=Host()))
    assert without.schedule.name.startswith("torus")
    plan = choose(problem, mask, topology)
    assert not plan.schedule.name.startswith("torus")
    assert plan.ranked[0].timing.launching == 0
    torus = simulate(without.schedule, topology)
    assert torus.seconds > 1.2 * plan.ranked[0].seconds


def test_the_reason_can_be_launches():
    topology = devices(1, 8, host=GPU_HOST)
    plan = choose(*schedule("ring", topology).attention, topology)
    assert plan.ranked[0].timing.launching == pytest.approx(plan.ranked[0].seconds)
    assert "launches" in plan.why()


@pytest.mark.parametrize("name", COSTS)
def test_costs_are_seconds(name):
    with pytest.raises(InputError, match=f"host.{name} must be ≥ 0, got -1"):
        Host(**{name: -1.0})


def test_a_host_comes_back_from_toml(tmp_path):
    topology = replace(cluster("2x8xh100"), name="two")
    path = tmp_path / "two.toml"
    path.write_text(topology.to_toml())
    assert Topology.from_toml(path) == topology
