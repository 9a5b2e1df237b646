"""Pieces as rectangles, and schedules as values with a digest of everything in them."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.core.samples import KV, MASK, MOVE, OPS, PROBLEM, SCHEDULE, Q
from weft.core.indices import Indices
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.schedule import Attend, Exchange, Piece, Transfer

pieces = st.builds(
    Piece,
    st.just("q"),
    st.sets(st.integers(0, 5)).map(Indices.of),
    st.sets(st.integers(0, 7)).map(Indices.of),
)


def cells(*found: Piece) -> list[tuple[int, int]]:
    return sorted((head, token) for piece in found for head in piece.heads for token in piece.tokens)


@given(pieces, pieces)
def test_pieces_are_rectangles_of_cells(a, b):
    assert cells(a & b) == sorted(set(cells(a)) & set(cells(b)))
    assert cells(*a.minus(b)) == sorted(set(cells(a)) - set(cells(b)))
    assert bool(a) == bool(cells(a))
    assert not b or a.covers(b) == (set(cells(a)) >= set(cells(b)))


@pytest.mark.parametrize(("tensor", "expected"), [("q", 6), ("o", 6), ("kv", 12), ("do", 6), ("dkv", 12)])
def test_a_kv_piece_is_two_tensors(tensor, expected):
    piece = Piece(tensor, Indices.of([0]), Indices.of([1, 3]))
    assert piece.elements(PROBLEM) == expected


def test_what_is_summed_travels_in_float32():
    assert Piece("q", Q.heads, Q.tokens).num_bytes(PROBLEM) == 9 * 2
    assert Piece("dq", Q.heads, Q.tokens).num_bytes(PROBLEM) == 9 * 4
    assert not Piece("do", Q.heads, Q.tokens).is_sum


def test_everything_prints_as_one_line_an_op():
    assert str(Q) == "q[heads 0, tokens 0-1,4]"
    assert str(MOVE) == "kv[heads 0, tokens 0-4] 1→0"
    lines = str(SCHEDULE).splitlines()
    assert lines[0].startswith("some backward on ring 2 · BlockMask(")
    assert lines[1:] == [f"{index:4d}  {op}" for index, op in enumerate(OPS)]
    assert str(Exchange((MOVE,) * 5)).endswith("; … 2 more)")


def test_transfers_and_attends_are_listed_with_the_index_of_their_op():
    assert list(SCHEDULE.transfers()) == [(0, MOVE)]
    assert list(SCHEDULE.attends()) == [(1, OPS[1])]


@pytest.mark.parametrize(
    "changes",
    [
        {"name": "other"},
        {"problem": dataclasses.replace(PROBLEM, batch=2)},
        {"mask": BlockMask.dense(2, 5)},
        {"mesh": Mesh.of(ulysses=2)},
        {"ops": OPS[:1]},
        {"ops": OPS[::-1]},
        {"ops": (OPS[0], Attend(1, Q, KV))},
        {"ops": (Exchange((Transfer(KV, 0, 1),), "fetch"), OPS[1])},
        {"backward": False},
        {"kept": ()},
    ],
)
def test_schedules_that_differ_in_anything_have_other_digests(changes):
    other = dataclasses.replace(SCHEDULE, **changes)
    assert other != SCHEDULE
    assert other.digest != SCHEDULE.digest


def test_equal_schedules_are_one_key():
    twin = dataclasses.replace(SCHEDULE, mask=BlockMask(5, 5, 7, 2, MASK.pattern_of, MASK.bits.copy()))
    assert len({SCHEDULE, twin}) == 1
    assert SCHEDULE != "some"


def test_schedules_that_differ_after_the_sixth_run_have_other_digests():
    even, odd = Indices.of(range(0, 20, 2)), Indices.of([*range(0, 18, 2), 19])
    ops = [(Exchange((Transfer(Piece("kv", Q.heads, tokens), 0, 1),)),) for tokens in (even, odd)]
    assert dataclasses.replace(SCHEDULE, ops=ops[0]) != dataclasses.replace(SCHEDULE, ops=ops[1])
