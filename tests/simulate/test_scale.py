"""What a thousand ranks need: look-ups that skip what cannot matter, and find what a loop finds."""

from hypothesis import given, settings

from tests.cases import cases
from weft.core.indices import EMPTY, Indices
from weft.core.layout import Layout
from weft.core.problem import Problem
from weft.core.topology import Topology
from weft.masks.random import random_mask
from weft.plan.choose import build
from weft.schedule.measure import measure
from weft.simulate.events import simulate


@given(cases(max_tokens=97))
@settings(max_examples=60, deadline=None)
def test_holders_are_those_who_hold_some(case):
    layout = case.problem.kv
    wanted = [*(work.tokens for _, op in case.schedule.attends() for work in (op.q, op.kv)), EMPTY]
    for tokens in (*wanted[:5], Indices.of(range(0, layout.size, 3)), layout.shared):
        inside = tokens & Indices.span(0, layout.size)
        assert layout.holders(inside) == [r for r in range(layout.ranks) if inside & layout.held(r)]


@given(cases(max_tokens=97))
@settings(max_examples=60, deadline=None)
def test_sources_are_oneself_and_then_the_first_that_hold(case):
    layout = case.problem.q
    everything = Indices.span(0, layout.size)
    for rank in range(layout.ranks):
        found = layout.sources(rank, everything)
        assert sum(part.size for _, part in found) == layout.size
        left = everything
        for source in (rank, *(r for r in range(layout.ranks) if r != rank)):
            part, left = left & layout.held(source), left - layout.held(source)
            assert dict(found).get(source, EMPTY) == part


def test_many_ranks_carry_what_their_schedule_says():
    layout = Layout.even(96 * 32, 96)
    problem = Problem(batch=1, heads=4, kv_heads=4, head_dim=8, q=layout, kv=layout)
    plan = build("usp:4x24", problem, random_mask(4, 96 * 32, 96 * 32, block=32, density=0.1))
    topology = Topology(machines=12, devices=8, nic_bandwidth=1e9, two_sided=True)
    timeline = simulate(plan, topology)
    assert (timeline.traffic == measure(plan).matrix()).all()
    assert timeline.machines == 12
