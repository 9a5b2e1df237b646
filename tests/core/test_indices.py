"""Indices behave as Python sets do, and stay in their one canonical form."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.indices import EMPTY, Indices, split_evenly

sets = st.sets(st.integers(0, 61), max_size=40)


def is_canonical(indices: Indices) -> bool:
    """Runs are not empty, ascend, and do not touch: equal sets then have equal runs."""
    flat = [end for run in indices.runs for end in run]
    return flat == sorted(set(flat))


@given(sets, sets)
def test_algebra_is_that_of_sets(a, b):
    x, y = Indices.of(a), Indices.of(b)
    for found, expected in ((x | y, a | b), (x & y, a & b), (x - y, a - b)):
        assert set(found) == expected
        assert is_canonical(found)
        assert found == Indices.of(expected)


@given(sets, sets)
def test_covers_means_superset(a, b):
    assert Indices.of(a).covers(Indices.of(b)) == (a >= b)


@given(sets, st.integers(0, 61))
def test_questions_about_one_set_answer_as_it_does(a, n):
    x = Indices.of(a)
    assert (len(x), x.size, bool(x), n in x) == (len(a), len(a), bool(a), n in a)
    assert x.array.tolist() == list(x) == sorted(a)


@given(sets, st.integers(1, 17))
def test_blocks_are_those_that_are_touched(a, size):
    blocks = Indices.of(a).blocks(size)
    assert set(blocks) == {n // size for n in a}
    assert is_canonical(blocks)


@given(st.lists(st.tuples(st.integers(0, 31), st.integers(0, 31)), max_size=7))
def test_runs_in_any_order_and_overlap_become_one_set(runs):
    found = Indices.from_runs(runs)
    assert set(found) == {n for start, stop in runs for n in range(start, stop)}
    assert is_canonical(found)


@given(st.integers(0, 30), st.integers(0, 30), st.sampled_from([1, 2, 3]))
def test_a_range_is_a_set_too(start, stop, step):
    assert list(Indices.of(range(start, stop, step))) == list(range(start, stop, step))
    assert Indices.span(start, stop) == Indices.of(range(start, stop))


def test_nothing_has_one_spelling():
    assert Indices.of([]) == Indices.span(5, 5) == Indices.span(7, 3) == Indices.of(range(3, 1)) == EMPTY


def test_repr_shows_runs_and_ends_after_six():
    assert repr(Indices.of([0, 1, 2, 3, 7])) == "Indices(0-3,7)"
    assert repr(EMPTY) == "Indices()"
    assert repr(Indices.of(range(0, 17, 2))) == "Indices(0,2,4,6,8,10,…3 more runs)"


@given(st.integers(0, 97), st.integers(1, 13))
def test_even_splits_are_whole_ordered_and_differ_by_one(size, parts):
    runs = split_evenly(size, parts)
    lengths = [stop - start for start, stop in runs]
    assert len(runs) == parts
    assert [n for run in runs for n in range(*run)] == list(range(size))
    assert max(lengths) - min(lengths) <= 1
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("attribute", ["runs", "size"])
def test_indices_are_frozen(attribute):
    with pytest.raises(AttributeError):
        setattr(Indices.span(0, 3), attribute, ())
