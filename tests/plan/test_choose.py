"""The planner: every strategy by its name, and the fastest of them by the predictor."""

import numpy as np
import pytest
from hypothesis import given, settings

from tests.cases import cases, names
from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.problem import Problem
from weft.core.topology import Link, Topology
from weft.masks.random import random_mask
from weft.plan.assignment import Assignment, natural_assignment
from weft.plan.choose import build, candidates, choose, usp_names
from weft.plan.split import whole
from weft.plan.strategies import parse
from weft.schedule.verify import verify
from weft.simulate.clusters import cluster
from weft.simulate.predict import predict


def of(ranks: int, tokens: int = 240, heads: int = 6, kv: Layout | None = None) -> Problem:
    layout = Layout.even(tokens, ranks)
    return Problem(batch=1, heads=heads, kv_heads=heads, head_dim=8, q=layout, kv=kv or layout)


def test_usp_names_are_all_ways_to_cut_the_ranks():
    assert usp_names(12) == ["usp:1x12", "usp:2x6", "usp:3x4", "usp:4x3", "usp:6x2", "usp:12x1"]


@pytest.mark.parametrize("ranks", [1, 2, 5, 6])
def test_every_name_builds_on_its_mesh(ranks):
    for name in names(ranks):
        schedule = build(name, of(ranks), BlockMask.dense(6, 240))
        assert schedule.mesh.ranks == ranks
        if name.startswith("usp:"):
            assert name.split("+")[0] == f"usp:{schedule.mesh.size('ulysses')}x{schedule.mesh.size('ring')}"


def test_auto_is_the_name_of_the_choice():
    mask, topology = BlockMask.dense(6, 240), Topology.local(6)
    assert build("auto", of(6), mask, topology) == choose(of(6), mask, topology).schedule
    with pytest.raises(InputError, match="no strategy 'auto'"):
        build("auto", of(6), mask, assignment=natural_assignment(of(6), mask, Mesh.of(ring=6)))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torus", "no strategy 'torus'. Use auto, ring, ulysses, gather, zigzag, usp:UxR"),
        ("", "no strategy ''"),
        ("usp:2", "no strategy 'usp:2'"),
        ("usp:2x2", "usp:2x2 needs 4 ranks; there are 6. Legal here: usp:1x6, usp:2x3, usp:3x2, usp:6x1"),
        ("usp:0x6", "Legal here"),
    ],
)
def test_unknown_names_list_the_legal_ones(name, words):
    with pytest.raises(InputError, match=words):
        build(name, of(6), BlockMask.dense(6, 240))


def listed(problem: Problem, mask: BlockMask, topology: Topology | None = None) -> list[str]:
    return [
        str(strategy) for strategy in candidates(problem, mask, topology or Topology.local(problem.ranks))
    ]


def test_candidates_are_every_cut_and_every_balance_that_could_matter():
    dense, sparse = BlockMask.dense(6, 240), random_mask(6, 240, 240, block=20, density=0.5)
    assert listed(of(6), dense) == [
        "ulysses", "usp:3x2", "gather:3x2", "usp:2x3", "gather:2x3", "ring", "gather",
    ]  # fmt: skip
    assert listed(of(2), sparse) == [
        "ulysses", "ulysses+balanced",
        "ring", "ring+balanced", "ring+cuts", "gather", "gather+balanced", "gather+cuts",
    ]  # fmt: skip
    assert listed(of(1), dense) == ["ring"]
    assert "ulysses+balanced" in listed(of(4), dense), "6 heads on 4 ranks are not even"
    two = Topology(machines=2, devices=2)
    assert "swapped:2x2" in listed(of(4), dense, two)


def test_replicated_keys_need_no_byte():
    plan = choose(of(3, kv=Layout.replicated(77, 3)), BlockMask.dense(6, 240, 77))
    assert plan.schedule.name.startswith(("gather", "ring"))
    assert verify(plan.schedule).total_bytes == 0


def test_a_local_mask_is_gathered():
    band = np.tri(12, k=1) * np.tri(12, k=1).T
    mask = BlockMask.from_tiles(band[None].repeat(6, axis=0), q_len=240, kv_len=240, block_q=20)
    slow = Topology(devices=4, intra=Link(latency=0, bandwidth=1e5))
    assert choose(of(4), mask, slow).schedule.name.startswith("gather")


def test_a_dense_mask_on_a_slow_wire_is_ulysses():
    slow = Topology(devices=6, intra=Link(latency=0, bandwidth=1e5))
    assert choose(of(6), BlockMask.dense(6, 240), slow).ranked[0].name == "ulysses"


@given(cases(max_tokens=97))
@settings(max_examples=40)
def test_the_choice_is_the_fastest_and_the_same_every_time(case):
    plan, again = (choose(case.problem, case.mask) for _ in range(2))
    topology = Topology.local(case.problem.ranks)
    assert plan.schedule == again.schedule
    assert plan.ranked == again.ranked
    built = {option.name for option in plan.ranked} | {name for name, _ in plan.left_out}
    assert built <= set(listed(case.problem, case.mask))
    assert len({build(option.name, case.problem, case.mask).ops for option in plan.ranked}) == len(
        plan.ranked
    )
    times = [predict(build(option.name, case.problem, case.mask), topology) for option in plan.ranked]
    assert [option.timing for option in plan.ranked] == times
    assert min(t.seconds for t in times) == times[0].seconds
    assert plan.schedule == build(plan.ranked[0].name, case.problem, case.mask)


@pytest.mark.parametrize("name", ["6xh100", "2x4xh100"])
def test_the_closed_form_leaves_out_no_winner(name):
    topology = cluster(name)
    layout = Layout.even(8192, topology.ranks)
    problem = Problem(batch=1, heads=24, kv_heads=24, head_dim=128, q=layout, kv=layout)
    mask = random_mask(24, 8192, 8192, block=256, density=0.2, cv=0.9)
    every = [str(strategy) for strategy in candidates(problem, mask, topology)]
    best = min(predict(build(way, problem, mask, topology), topology).seconds for way in every)
    assert choose(problem, mask, topology).ranked[0].seconds < 1.01 * best


def test_explain_has_a_line_a_candidate_the_best_first():
    lines = choose(of(6), BlockMask.dense(6, 240)).explain().splitlines()
    assert len(lines) == 7
    assert " 1.00× " in lines[0]
    assert all("imbalance 1.000, at least 1.000" in line for line in lines[:-1])
    assert lines[-1].startswith(lines[0].split()[0])


def test_a_topology_of_other_ranks_is_refused():
    with pytest.raises(InputError, match="topology local has 5 ranks, the tensors are on 6"):
        choose(of(6), BlockMask.dense(6, 240), Topology.local(5))


def test_a_mask_of_nothing_is_explained_too():
    empty = BlockMask.from_tiles(np.zeros((6, 1, 1)), q_len=240, kv_len=240, block_q=240)
    assert "the only strategy" in choose(of(6), empty).explain()


def assigned(mask, name, groups):
    """Heads as they are given, blocks where they are."""
    ranks = 3 if name == "ulysses" else 6
    mesh = parse(name, ranks).mesh
    rows = natural_assignment(of(ranks), mask, mesh).rows[:1].repeat(len(groups), 0)
    return Assignment(whole(groups), rows, rows, 20, 20)


def test_an_assignment_says_who_has_which_heads():
    mask = random_mask(6, 240, 240, block=20, density=0.4)
    groups = ((0, 5), (1, 2, 3), (4,))
    for name in ("ulysses", "usp:3x2"):
        ranks = 3 if name == "ulysses" else 6
        schedule = build(name, of(ranks), mask, assignment=assigned(mask, name, groups))
        verify(schedule)
        mesh = schedule.mesh
        for _, attend in schedule.attends():
            assert tuple(attend.q.heads) == groups[mesh.coordinate(attend.rank).get("ulysses", 0)]
    for bad in (((0, 1, 2), (3, 4, 5)), ((0, 0), (1, 2, 3), (4, 5)), ((0,), (1,), (2,))):
        with pytest.raises(InputError, match="does not fit ulysses"):
            build("ulysses", of(3), mask, assignment=assigned(mask, "ulysses", bad))
