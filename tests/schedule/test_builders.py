"""Every builder, on any problem: what it returns is proven, forward and backward."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from tests.cases import Case, cases, names, random_case
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange
from weft.plan.choose import build
from weft.schedule.reverse import reverse
from weft.schedule.usp import MAX_RESENT
from weft.schedule.verify import verify


def problem(ranks: int, heads: int = 3, tokens: int = 41) -> Problem:
    layout = Layout.even(tokens, ranks)
    return Problem(batch=1, heads=heads, kv_heads=heads, head_dim=4, q=layout, kv=layout)


@given(cases())
@settings(max_examples=150)
def test_every_schedule_of_every_builder_is_proven(case):
    verify(case.schedule)


@given(cases())
@settings(max_examples=150)
def test_every_backward_schedule_is_proven_whatever_is_kept(case):
    for keep in ("all", "none", "auto"):
        verify(reverse(case.schedule, keep=keep))


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 6, 12])
def test_every_mesh_of_heads_and_ring_is_proven(ranks):
    mask = BlockMask.from_tiles(
        np.tril(np.ones((6, 6)))[None].repeat(3, axis=0), q_len=41, kv_len=41, block_q=7
    )
    for name in names(ranks):
        verify(build(name, problem(ranks), mask))


@given(cases(max_tokens=97))
@settings(max_examples=50)
def test_work_is_that_of_the_mask_whoever_does_it(case):
    report = verify(case.schedule)
    expected = case.mask.density * case.mask.heads * case.mask.q_len * case.mask.kv_len
    assert sum(report.work) == pytest.approx(expected, abs=1e-6)


@given(cases(max_tokens=97))
@settings(max_examples=50)
def test_builders_are_functions_of_their_arguments(case):
    again = Case(case.problem, case.mask, case.name)
    assert again.schedule.ops == case.schedule.ops
    assert again.schedule.digest == case.schedule.digest


@given(cases(max_tokens=97))
@settings(max_examples=50)
def test_no_operation_is_idle(case):
    for op in (*case.schedule.ops, *reverse(case.schedule).ops):
        if isinstance(op, Attend):
            rows, cols = op.q.tokens.blocks(case.mask.block_q), op.kv.tokens.blocks(case.mask.block_k)
            assert case.mask.select(op.q.heads, rows, cols).any()
        else:
            assert op.transfers


@given(cases(max_tokens=97))
@settings(max_examples=50)
def test_nothing_is_sent_to_whom_has_it_at_home(case):
    """But for a few tokens of a chunk that a ring passes on whole."""
    for _, transfer in case.schedule.transfers():
        if transfer.piece.tensor != "o":
            tokens, home = transfer.piece.tokens, case.problem.home(transfer.piece.tensor)
            resent = MAX_RESENT if transfer.piece.tensor == "kv" else 0
            assert (tokens & home.held(transfer.dst)).size <= resent * tokens.size


def test_one_rank_moves_nothing():
    for name in names(1):
        assert list(build(name, problem(1), BlockMask.dense(3, 41)).transfers()) == []


def test_a_mask_of_nothing_is_a_schedule_of_nothing():
    mask = BlockMask.from_tiles(np.zeros((3, 6, 6)), q_len=41, kv_len=41, block_q=7)
    for name in names(6):
        schedule = build(name, problem(6), mask)
        assert schedule.ops == reverse(schedule).ops == ()


def test_usp_of_one_axis_is_ulysses_or_ring():
    mask = BlockMask.dense(3, 41)
    assert build("usp:5x1", problem(5), mask).ops == build("ulysses", problem(5), mask).ops
    assert build("usp:1x5", problem(5), mask).ops == build("ring", problem(5), mask).ops


def test_ulysses_is_one_exchange_in_and_one_home():
    schedule = build("ulysses", problem(3), BlockMask.dense(3, 41))
    assert [type(op) for op in schedule.ops] == [Exchange, Attend, Attend, Attend, Exchange]


def test_ring_posts_each_hop_before_the_attention_that_hides_it():
    schedule = build("ring", problem(3), BlockMask.dense(3, 41))
    assert [type(op).__name__[0] for op in schedule.ops] == list("EAAAEAAAAAA")
    for op in schedule.ops:
        if isinstance(op, Exchange):
            assert [(t.src, t.dst) for t in op.transfers] == [(0, 1), (1, 2), (2, 0)]


def test_ring_stops_where_nobody_further_on_needs_a_block():
    causal = BlockMask.from_tiles(np.tril(np.ones((1, 4, 4))), q_len=28, kv_len=28, block_q=7)
    schedule = build("ring", problem(4, heads=1, tokens=28), causal)
    links = Counter((t.src, t.dst) for _, t in schedule.transfers())
    assert links == {(0, 1): 1, (1, 2): 2, (2, 3): 3}


def test_gather_attends_what_is_at_home_first():
    schedule = build("gather", problem(3), BlockMask.dense(3, 41))
    assert isinstance(schedule.ops[0], Exchange)
    for op in schedule.ops[1:4]:
        assert op.kv.tokens == schedule.problem.kv.held(op.rank)


def test_replicated_keys_are_read_in_place():
    layouts = {"q": Layout.even(41, 3), "kv": Layout.replicated(17, 3)}
    crossed = Problem(batch=1, heads=3, kv_heads=3, head_dim=4, **layouts)
    for name in ("ring", "gather"):
        assert build(name, crossed, BlockMask.dense(3, 41, 17)).ops[0].rank == 0
        assert not list(build(name, crossed, BlockMask.dense(3, 41, 17)).transfers())


def test_cases_reach_every_strategy_and_every_oddity():
    rng = np.random.default_rng(0)
    seen = [random_case(rng) for _ in range(2999)]
    assert {case.name for case in seen} >= set(names(6)) | {"usp:4x2", "usp:2x4"}
    assert {case.problem.ranks for case in seen} == set(range(1, 9))
    assert {case.problem.heads for case in seen} == set(range(1, 14))
    assert any(case.problem.kv_heads < case.problem.heads for case in seen)
    assert any(case.problem.q.shared and case.problem.q.shared.size < case.problem.q.size for case in seen)
    assert any(case.mask.q_blocks < case.problem.ranks for case in seen)
    assert any(not case.mask.patterns.any() for case in seen)
    assert any(case.problem.q.padding and case.problem.kv.size != case.problem.q.size for case in seen)
