"""Each rule of `verify`, broken by hand: who breaks it is named, and which tile or token is concerned."""

from dataclasses import replace

import numpy as np
import pytest

from weft.core.errors import InputError, ScheduleError
from weft.core.indices import Indices
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.problem import Problem
from weft.core.schedule import Attend, Exchange, Op, Piece, Schedule, Transfer
from weft.schedule.reverse import reverse
from weft.schedule.verify import verify

# Two ranks, 2 heads of 10 tokens, 5 on each; rank 0 fetches rank 1's keys and the other way round.
LAYOUT = Layout.even(10, 2)
PROBLEM = Problem(batch=1, heads=2, kv_heads=1, head_dim=3, q=LAYOUT, kv=LAYOUT)
BLOCKS = BlockMask.from_tiles([[[1, 1], [1, 1]], [[1, 0], [0, 1]]], q_len=10, kv_len=10, block_q=5)
FIRST, LAST, ALL = (Indices.span(*run) for run in ((0, 5), (5, 10), (0, 10)))
HEADS, HEAD = Indices.span(0, 2), Indices.of([0])


def q(tokens: Indices, heads: Indices = HEADS) -> Piece:
    return Piece("q", heads, tokens)


def kv(tokens: Indices, heads: Indices = HEAD) -> Piece:
    return Piece("kv", heads, tokens)


FETCH = Exchange((Transfer(kv(FIRST), 0, 1), Transfer(kv(LAST), 1, 0)), "fetch")
ZERO, ONE = Attend(0, q(FIRST), kv(ALL)), Attend(1, q(LAST), kv(ALL))


def plan(*ops: Op, mask: BlockMask = BLOCKS, **changes) -> Schedule:
    return Schedule("hand", PROBLEM, mask, Mesh.of(ring=2), ops, **changes)


def move(tensor: str, heads: Indices, tokens: Indices, src: int, dst: int) -> Exchange:
    return Exchange((Transfer(Piece(tensor, heads, tokens), src, dst),))


def test_the_plan_that_the_others_spoil_is_sound():
    assert verify(plan(FETCH, ZERO, ONE)).work == (75, 75)
    verify(plan(FETCH, ZERO, ONE, mask=BlockMask.dense(2, 10)))
    verify(reverse(plan(FETCH, ZERO, ONE), keep="all"))
    verify(reverse(plan(FETCH, ZERO, ONE), keep="none"))


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ((FETCH, ZERO), r"^hand: tile \(head 0, q block 1, kv block 0\) is never computed"),
        ((FETCH, ZERO, ZERO, ONE), r"op 2, .*tile \(head 0, q block 0, kv block 0\) is computed a second"),
        ((ZERO, FETCH, ONE), "op 0, .*rank 0 does not have kv of head 0, token 5"),
        ((FETCH, FETCH, ZERO, ONE), "op 1, .*rank 1 already has some of it"),
        ((FETCH, replace(ZERO, rank=1), ONE), "op 1, .*rank 1 does not have q of head 0, token 0"),
        ((FETCH, ZERO, replace(ONE, kv=kv(Indices.span(0, 8)))), "op 2, .*cuts a block of 5 tokens in two"),
        ((FETCH, replace(ZERO, q=q(Indices.span(0, 3))), ONE), "op 1, .*cuts a block"),
        ((FETCH, replace(ZERO, kv=kv(ALL, Indices.of([1]))), ONE), "op 1, .*beyond 1 heads and 10 tokens"),
        ((FETCH, replace(ZERO, q=q(FIRST, Indices.span(0, 3))), ONE), "op 1, .*beyond 2 heads"),
        ((FETCH, replace(ZERO, q=q(Indices())), ONE), "op 1, .*is empty"),
        ((move("kv", HEAD, LAST, 1, 2), ZERO, ONE), "op 0, .*no such rank; ranks are 0 to 1"),
        ((move("kv", HEAD, LAST, -1, 0), ZERO, ONE), "op 0, .*no such rank"),
        ((move("kv", HEAD, LAST, 1, 1), ZERO, ONE), "op 0, .*a rank sends to itself"),
        ((move("kv", HEAD, LAST, 0, 1), ZERO, ONE), "op 0, .*rank 0 does not have kv of head 0, token 5"),
        ((move("kv", HEADS, LAST, 1, 0), ZERO, ONE), "op 0, .*beyond 1 heads and 10 tokens"),
        ((move("kv", HEAD, Indices(), 1, 0), ZERO, ONE), "op 0, .*is empty"),
        ((move("dq", HEAD, LAST, 1, 0), ZERO, ONE), "op 0, .*moves q, kv and o, not 'dq'"),
        ((FETCH, move("o", HEAD, FIRST, 0, 1), ZERO, ONE), "op 1, .*rank 0 does not compute all of this"),
        ((FETCH, ZERO, ONE, move("o", HEAD, FIRST, 1, 0)), "op 3, .*rank 1 does not compute all of this"),
    ],
)
def test_a_broken_rule_is_told_with_its_op(ops, words):
    with pytest.raises(ScheduleError, match=words):
        verify(plan(*ops))


def test_an_output_that_also_goes_where_nobody_asked_for_it_does_no_harm():
    verify(plan(FETCH, ZERO, move("o", HEAD, FIRST, 0, 1), ONE))


def test_an_output_leaves_only_when_whole():
    far = (move("q", HEADS, FIRST, 0, 1), Exchange(FETCH.transfers[:1]))
    near, rest = (Attend(1, q(FIRST, HEAD), kv(tokens)) for tokens in (FIRST, LAST))
    other = Attend(1, q(FIRST, Indices.of([1])), kv(FIRST))
    home = move("o", HEADS, FIRST, 1, 0)
    verify(plan(*far, near, rest, other, ONE, home))
    with pytest.raises(ScheduleError, match="op 5, .*an output leaves before its last tile is merged"):
        verify(plan(*far, near, other, ONE, home, rest))
    with pytest.raises(ScheduleError, match="^hand: output of head 0, q block 0 never reaches rank 0"):
        verify(plan(*far, near, rest, other, ONE))


def test_an_output_does_not_come_back_to_whom_computed_it():
    there, back = move("o", HEAD, FIRST, 0, 1), move("o", HEAD, FIRST, 1, 0)
    with pytest.raises(ScheduleError, match="op 4, .*rank 0 computed some of this output itself"):
        verify(plan(FETCH, ZERO, ONE, there, back))


def test_a_row_stays_on_one_rank():
    ops = (FETCH, move("q", HEADS, FIRST, 0, 1), replace(ZERO, kv=kv(FIRST)), Attend(1, q(FIRST), kv(LAST)))
    with pytest.raises(ScheduleError, match="op 3, .*some of its rows are also computed on rank 0"):
        verify(plan(*ops, ONE))


def test_query_heads_need_their_own_key_heads():
    problem = replace(PROBLEM, kv_heads=2)
    ops = (FETCH, replace(ZERO, kv=kv(ALL)), replace(ONE, kv=kv(ALL)))
    with pytest.raises(ScheduleError, match=r"op 1, .*heads Indices\(0-1\) need .*heads Indices\(0-1\)"):
        verify(replace(plan(*ops), problem=problem))


def test_transfers_of_one_exchange_start_together():
    layout = Layout.even(3, 3)
    problem = Problem(batch=1, heads=1, kv_heads=1, head_dim=3, q=layout, kv=layout)
    relay = tuple(Transfer(kv(HEAD), src, src + 1) for src in (0, 1))
    for ops, op in (((Exchange(relay),), 0), ((Exchange(relay[1:]), Exchange(relay[:1])), 0)):
        with pytest.raises(ScheduleError, match=f"op {op}, .*1→2: rank 1 does not have kv"):
            verify(Schedule("relay", problem, BlockMask.dense(1, 3), Mesh.of(ring=3), ops))


GRADIENTS, AGAIN = (reverse(plan(FETCH, ZERO, ONE), keep=keep) for keep in ("all", "none"))
AWAY = plan(move("q", HEADS, FIRST, 0, 1), FETCH, replace(ZERO, rank=1), ONE, move("o", HEADS, FIRST, 1, 0))
AWAY_GRADIENTS = reverse(AWAY, keep="all")


def changed(schedule: Schedule, index: int, *ops: Op) -> Schedule:
    return replace(schedule, ops=(*schedule.ops[:index], *ops, *schedule.ops[index + 1 :]))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (changed(GRADIENTS, 2), "^hand: dkv of head 0, computed on rank 0, never gets home"),
        (changed(GRADIENTS, 2, GRADIENTS.ops[2], GRADIENTS.ops[2]), "op 3, .*this gradient a second time"),
        (changed(GRADIENTS, 0, GRADIENTS.ops[2], ZERO), "op 1, .*adds to dkv that rank 0 has already sent"),
        (changed(GRADIENTS, 2, move("dkv", HEAD, FIRST, 0, 1)), "op 2, .*rank 0 is home to some of"),
        (changed(GRADIENTS, 2, move("o", HEADS, FIRST, 0, 1)), "op 2, .*do, dq and dkv, not 'o'"),
        (changed(AGAIN, 0, move("kv", HEAD, LAST, 0, 1)), "op 0, .*rank 0 does not have kv of head 0"),
        (replace(GRADIENTS, kept=()), "op 0, .*rank 0 does not have kv"),
        (replace(GRADIENTS, kept=((Piece("do", HEADS, FIRST),), ())), "cannot be kept"),
        (replace(GRADIENTS, kept=(GRADIENTS.kept[0][:1], *GRADIENTS.kept[1:])), "op 0, .*has no lse"),
        (changed(AWAY_GRADIENTS, 0), "op 0, .*rank 1 does not have the output gradient that rank 0 holds"),
        (
            changed(AWAY_GRADIENTS, 0, AWAY_GRADIENTS.ops[0], AWAY_GRADIENTS.ops[0]),
            "op 1, .*rank 0 sends some of its output gradient a second time",
        ),
        (changed(AWAY_GRADIENTS, 0, move("do", HEADS, FIRST, 1, 0)), "op 0, .*rank 1 does not hold do"),
        (changed(AWAY_GRADIENTS, 4), "^hand: dq of head 0, computed on rank 1, never gets home"),
    ],
)
def test_a_broken_rule_of_gradients_is_told_too(schedule, words):
    with pytest.raises(ScheduleError, match=words):
        verify(schedule)


def test_gradients_go_to_a_home_of_their_tensor():
    three = replace(PROBLEM, q=Layout.uneven([5, 5, 0]), kv=Layout.uneven([5, 5, 0]))
    gradients = replace(GRADIENTS, problem=three, mesh=Mesh.of(ring=3), kept=(*GRADIENTS.kept, ()))
    astray = tuple(replace(t, dst=2) if t.src == 0 else t for t in GRADIENTS.ops[2].transfers)
    verify(gradients)
    with pytest.raises(ScheduleError, match="op 2, .*rank 2 is not home to dkv of head 0, token 5"):
        verify(changed(gradients, 2, Exchange(astray)))


def test_backward_schedules_are_not_reversed_again():
    with pytest.raises(InputError, match="already a backward schedule. Pass the forward one"):
        reverse(GRADIENTS)
    with pytest.raises(InputError, match="keep must be 'all', 'none' or 'auto', got 'some'"):
        reverse(AWAY, keep="some")


def test_reverse_keeps_what_was_received_and_what_was_computed():
    computed = Piece("o", HEADS, FIRST)
    assert set(AWAY_GRADIENTS.kept[1]) == {q(FIRST), kv(FIRST), computed, Piece("o", HEADS, LAST)}
    assert set(reverse(AWAY, keep="none").kept[1]) == {q(FIRST), computed, Piece("o", HEADS, LAST)}


BEYOND = Indices.span(0, 99)


@pytest.mark.parametrize(
    "ops",
    [
        (FETCH, replace(ZERO, rank=2), ONE),
        (FETCH, replace(ZERO, kv=kv(BEYOND)), ONE),
        (move("kv", HEAD, BEYOND, 0, 1), ZERO, ONE),
        (FETCH, replace(ZERO, q=Piece("o", HEADS, FIRST)), ONE),
    ],
    ids=["rank", "keys", "transfer", "tensor"],
)
def test_what_is_out_of_bounds_is_told_with_its_op(ops):
    with pytest.raises(ScheduleError, match=r"op \d, "):
        verify(plan(*ops))


def test_attend_takes_q_and_kv():
    with pytest.raises(ScheduleError):
        verify(plan(FETCH, replace(ZERO, q=Piece("kv", HEAD, FIRST), kv=kv(ALL)), ONE, mask=one_head()))


def test_forward_schedules_keep_nothing():
    with pytest.raises(ScheduleError):
        verify(plan(ZERO, ONE, kept=((kv(LAST),), (kv(FIRST),))))


def one_head() -> BlockMask:
    """Head 1 has no tiles, so that nobody misses it."""
    return BlockMask.from_tiles(np.stack([np.ones((2, 2)), np.zeros((2, 2))]), q_len=10, kv_len=10, block_q=5)
