"""Placement: which axis crosses machines, how many bytes that costs, and when the planner takes a torus."""

import pytest

from weft.core.codec import dumps, loads
from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.problem import Problem
from weft.core.topology import Link, Topology
from weft.masks.random import random_mask
from weft.plan.balanced import Deals
from weft.plan.choose import build, candidates, choose
from weft.plan.strategies import parse
from weft.plan.strategies.torus import Torus
from weft.plan.strategy import factors, most_machines, placed
from weft.schedule.measure import measure
from weft.schedule.verify import verify
from weft.simulate.predict import predict

GRIDS = [(n, m) for n in (1, 2, 3, 4, 6) for m in (1, 2, 3, 4)]


@pytest.mark.parametrize(("machines", "devices"), GRIDS)
def test_ulysses_takes_the_most_machines_and_rails_are_aligned(machines, devices):
    for ulysses, ring in factors(machines * devices):
        fits = [
            n
            for n in range(1, machines + 1)
            if not machines % n and not ulysses % n and not devices % (ulysses // n)
        ]
        most = most_machines(ulysses, machines, devices)
        assert most == max(fits)
        mesh = placed(ulysses, machines, devices)
        assert dict(mesh.axes) == {"ulysses": ulysses, "ring": ring}
        assert sorted(mesh.rank(**mesh.coordinate(rank)) for rank in range(mesh.ranks)) == list(
            range(mesh.ranks)
        )
        for group in mesh.groups("ulysses"):
            assert len({rank // devices for rank in group}) == most
            per_machine = {
                frozenset(r % devices for r in group if r // devices == m) for m in range(machines)
            }
            assert len(per_machine - {frozenset()}) == 1, "the same devices on every machine"
        for group in mesh.groups("ring"):
            assert len({rank // devices for rank in group}) == machines // most
            here = [rank for rank in group if rank // devices == group[0] // devices]
            assert here == list(range(here[0], here[0] + len(here))), "neighbours"


def test_where_all_machines_are_on_the_ulysses_axis_ranks_stay_in_order():
    assert placed(4, 4, 2) == Mesh.of(ulysses=4, ring=2)
    assert placed(2, 4, 2).order == (0, 1, 4, 5, 2, 3, 6, 7)
    assert parse("swapped:4x2", 8).mesh_on(Topology(machines=4, devices=2)) == Mesh.of(ulysses=4, ring=2)
    assert parse("usp:2x4", 8).mesh_on(Topology(machines=4, devices=2)) == Mesh.of(ring=4, ulysses=2)


def test_an_arranged_mesh_is_a_value_like_others():
    mesh = placed(2, 4, 2)
    assert loads(dumps(mesh)) == mesh != Mesh.of(ulysses=2, ring=4)
    assert mesh.groups("ring") == ((0, 1, 4, 5), (2, 3, 6, 7))
    assert mesh.coordinate(4) == {"ulysses": 0, "ring": 2}
    assert loads('{"kind": "Mesh", "axes": [["ring", 2]]}') == Mesh.of(ring=2), "as it was written before"
    problem, mask = of(8, 4, 64), BlockMask.dense(4, 64)
    here = build("swapped:2x4", problem, mask, Topology(machines=4, devices=2))
    assert loads(dumps(here)) == here != build("swapped:2x4", problem, mask)


@pytest.mark.parametrize("order", [(0, 1), (0, 0, 1), (1, 2, 3)])
def test_an_order_names_each_rank_once(order):
    with pytest.raises(InputError, match="Name each of 0 to 2 once"):
        Mesh((("ring", 3),), order)


def test_a_placement_is_for_all_ranks_of_its_topology():
    with pytest.raises(InputError, match=r"swapped:2x2 is for 4 ranks, local has 6"):
        parse("swapped:2x2", 4).mesh_on(Topology(machines=3, devices=2))


def of(ranks: int, heads: int, tokens: int, kv_heads: int | None = None, head_dim: int = 4) -> Problem:
    layout = Layout.even(tokens, ranks)
    kv_heads = kv_heads or heads
    return Problem(batch=2, heads=heads, kv_heads=kv_heads, head_dim=head_dim, q=layout, kv=layout)


def egress(name: str, problem: Problem, topology: Topology) -> list[int]:
    """Elements that leave each machine."""
    schedule = build(name, problem, BlockMask.dense(problem.heads, problem.q.size), topology)
    verify(schedule)
    found = [0] * topology.machines
    for (src, dst), size in measure(schedule).link_bytes.items():
        if topology.machine(src) != topology.machine(dst):
            found[topology.machine(src)] += size // problem.item_bytes
    return found


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 12), (24, 24), (24, 12), (8, 8)])
@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("machines", [1, 2, 3, 4])
def test_bytes_between_machines_are_those_of_the_formula(machines, devices, heads, kv_heads):
    """V(N, N_u) = (E/N)·2(N_u-1)/N_u + (K/N)·2(N-1)/N_u, over one denominator to stay in integers."""
    topology = Topology(machines=machines, devices=devices)
    ranks = topology.ranks
    problem = of(ranks, heads, 6 * ranks, kv_heads)
    query = 2 * 6 * ranks * heads * 4
    key = query * kv_heads // heads

    def volume(on_ulysses: int) -> int:
        whole = query * 2 * (on_ulysses - 1) + key * 2 * (machines - 1)
        assert whole % (machines * on_ulysses) == 0
        return whole // (machines * on_ulysses)

    for ulysses, ring in factors(ranks):
        if kv_heads % ulysses:
            continue
        most = most_machines(ulysses, machines, devices)
        for tuned in ("", "c2d1"):
            assert egress(f"torus:{ulysses}x{ring}{tuned}", problem, topology) == [volume(most)] * machines
        # A flat ring of several ranks on several machines passes on more at their borders.
        if most == machines or ring == machines // most:
            assert egress(f"swapped:{ulysses}x{ring}", problem, topology) == [volume(most)] * machines
        if ulysses == devices:
            assert egress(f"usp:{ulysses}x{ring}", problem, topology) == [volume(1)] * machines


def slow(machines: int, devices: int, rho: float, tokens: int = 2304, rate: float = 47.5e6) -> Topology:
    """Machines whose network takes 1/rho as long for one piece of queries as a device for its attention."""
    return Topology(
        machines=machines,
        devices=devices,
        intra=Link(latency=1e-4, bandwidth=1e9),
        inter=Link(latency=2e-4, bandwidth=rate),
        nic_bandwidth=rate,
        flops=tokens * rate / (machines * devices * rho),
        two_sided=True,
    )


@pytest.mark.parametrize(("machines", "gain"), [(2, 1.2), (3, 1.3), (4, 1.4)])
def test_a_torus_is_taken_where_it_pays_and_usp_where_all_is_hidden(machines, gain):
    problem = of(machines * 2, 12, 2304, head_dim=64)
    mask = BlockMask.dense(12, 2304)
    plan = choose(problem, mask, slow(machines, 2, 1.0))
    assert plan.ranked[0].strategy.kind == "torus"
    usp = predict(build(f"usp:2x{machines}", problem, mask), slow(machines, 2, 1.0)).seconds
    assert usp > gain * plan.ranked[0].seconds
    hidden = choose(problem, mask, slow(machines, 2, 4.0))
    assert hidden.ranked[0].strategy.kind == "usp"
    assert [option.strategy.kind == "torus" for option in hidden.ranked].count(True) >= 1


def test_the_closed_form_of_a_torus_is_near_its_simulation():
    problem, mask = of(6, 12, 2304, head_dim=64), BlockMask.dense(12, 2304)
    for rho in (0.25, 1.0, 4.0):
        topology = slow(3, 2, rho)
        deals = Deals(problem, mask, topology)
        for name in ("torus:3x2", "torus:3x2c2d1", "torus:6x1d0", "torus:2x3"):
            strategy = parse(name, 6)
            guess = strategy.estimate(problem, topology, deals.deal(strategy))
            seconds = predict(build(name, problem, mask, topology), topology).seconds
            assert 0.85 < guess / seconds < 1.15, name


def test_tori_do_not_crowd_out_other_ways():
    problem, mask = of(6, 12, 2304, head_dim=64), random_mask(12, 2304, 2304, block=64, density=0.3)
    plan = choose(problem, mask, slow(3, 2, 0.5))
    kinds = [option.strategy.kind for option in plan.ranked]
    assert kinds.count("torus") <= 8
    assert len(kinds) - kinds.count("torus") == 6


def test_one_machine_has_no_torus():
    problem, mask = of(6, 12, 96), BlockMask.dense(12, 96)
    assert not any(strategy.kind == "torus" for strategy in candidates(problem, mask, Topology.local(6)))


@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("torus:4x2", Torus(4, 2)),
        ("torus:4x2c2", Torus(4, 2, chunks=2)),
        ("torus:8x1d0", Torus(8, 1, defer=0)),
        ("torus:1x8c3d12+balanced", Torus(1, 8, "balanced", 3, 12)),
    ],
)
def test_torus_names_read_back(name, strategy):
    assert parse(name, 8) == strategy
    assert str(strategy) == name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torus:3x2", "needs 6 ranks; there are 8.*torus:1x8, torus:2x4"),
        ("torus:4x2c0", "c0 leaves nothing to send"),
        ("usp:4x2c2", "no strategy 'usp:4x2c2'"),
        ("torus:4x2d1c2", "no strategy"),
    ],
)
def test_what_is_no_torus_says_what_would_be(name, says):
    with pytest.raises(InputError, match=says):
        parse(name, 8)
