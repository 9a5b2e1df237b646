"""Who holds which indices, for every way to lay them out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cases import cases
from weft.core.codec import digest
from weft.core.errors import InputError
from weft.core.indices import EMPTY, Indices
from weft.core.layout import Layout

layouts = cases().map(lambda case: case.problem.q)
sizes, ranks = st.integers(0, 101), st.integers(1, 7)


def held(layout: Layout) -> list[list[int]]:
    return [layout.order(rank).tolist() for rank in range(layout.ranks)]


@given(layouts)
def test_every_index_is_held_and_none_twice_on_a_rank(layout):
    orders = held(layout)
    assert set().union(*orders) == set(range(layout.size))
    for rank, order in enumerate(orders):
        assert sorted(order) == list(layout.held(rank))
        assert layout.rows(rank) == len(order) + (layout.padding[rank] if layout.padding else 0)


@given(layouts, st.data())
def test_sources_give_each_index_once_from_a_holder_and_from_itself_where_possible(layout, data):
    rank = data.draw(st.integers(0, layout.ranks - 1))
    wanted = Indices.of(data.draw(st.sets(st.integers(0, layout.size - 1))))
    found = layout.sources(rank, wanted)
    assert sorted(n for _, part in found for n in part) == list(wanted)
    for source, part in found:
        assert layout.held(source).covers(part)
        assert source == rank or not part & layout.held(rank)


@given(layouts)
def test_shared_is_what_every_rank_holds(layout):
    everywhere = set.intersection(*(set(layout.held(rank)) for rank in range(layout.ranks)))
    assert set(layout.shared) == (everywhere if layout.ranks > 1 else set())


@given(sizes, ranks)
def test_even_shards_are_contiguous_and_differ_by_one(size, ranks):
    orders = held(Layout.even(size, ranks))
    assert [n for order in orders for n in order] == list(range(size))
    assert max(map(len, orders)) - min(map(len, orders)) <= 1


@given(sizes, ranks)
def test_zigzag_pairs_an_early_chunk_with_a_late_one(size, ranks):
    chunks = [c.tolist() for c in np.array_split(np.arange(size), 2 * ranks)]
    assert held(Layout.zigzag(size, ranks)) == [chunks[r] + chunks[-1 - r] for r in range(ranks)]


def test_prefix_and_suffix_are_on_every_rank():
    layout = Layout.even(11, 3, prefix=2, suffix=1)
    assert held(layout) == [[0, 1, 2, 3, 4, 10], [0, 1, 5, 6, 7, 10], [0, 1, 8, 9, 10]]
    assert layout.shared == Indices.of([0, 1, 10])


def test_a_sequence_that_is_all_text_is_replicated():
    assert Layout.even(5, 3, prefix=2, suffix=3) == Layout.replicated(5, 3)
    assert Layout.replicated(5, 3).shared == Indices.span(0, 5)
    assert Layout.replicated(5, 1).shared == EMPTY


def test_uneven_shards_may_be_empty():
    assert held(Layout.uneven([3, 0, 2])) == [[0, 1, 2], [], [3, 4]]
    assert Layout.uneven([2, 2, 1]) == Layout.even(5, 3)


def test_permuted_keeps_the_order_of_rows():
    orders = [[4, 0, 1], [3], [], [2, 6, 5]]
    layout = Layout.permuted(orders)
    assert held(layout) == orders
    assert layout.held(0) == Indices.of([0, 1, 4])


def test_padding_adds_rows_but_no_indices():
    layout = Layout.even(5, 2).padded(4)
    assert (layout.padding, layout.rows(0), layout.rows(1)) == ((1, 2), 4, 4)
    assert held(layout) == held(Layout.even(5, 2))
    assert Layout.even(5, 2).padded([3, 7]).padding == (0, 5)


def test_str_shows_ranks_and_ends_after_eight():
    assert str(Layout.even(7, 3)) == "tokens 7 over 3 ranks: 0-2 | 3-4 | 5-6"
    assert str(Layout.uneven([2, 0]).padded(2)) == "tokens 2 over 2 ranks padded: 0-1 | -"
    assert str(Layout.even(11, 11, dim="frames")).endswith("7-7 | … 3 more")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Layout(3, ()), "at least one rank"),
        (lambda: Layout(5, (((0, 2),), ((3, 5),))), r"do not cover 5 tokens: no rank holds Indices\(2\)"),
        (lambda: Layout(3, (((0, 2),), ((2, 5),))), r"Indices\(3-4\) are beyond the end"),
        (lambda: Layout(3, (((0, 2), (1, 3)),)), "Rank 0 holds some tokens twice"),
        (lambda: Layout(3, (((0, 3),),), padding=(1, 2)), "one count ≥ 0 for each of 1 ranks"),
        (lambda: Layout.permuted([[0, 0, 1]]), "Rank 0 holds some tokens twice"),
        (lambda: Layout.permuted([[0], [2]]), "no rank holds"),
        (lambda: Layout.even(5, 2, prefix=3, suffix=3), "prefix=3 and suffix=3 do not fit into 5 tokens"),
        (lambda: Layout.even(5, 2, prefix=-1), "prefix=-1"),
        (lambda: Layout.uneven([3, -1]), r"one count ≥ 0 for each rank, got \[3, -1\]"),
        (lambda: Layout.uneven([]), r"one count ≥ 0 for each rank, got \[\]"),
        (lambda: Layout.replicated(5, 0), "at least one rank"),
        (lambda: Layout.even(5, 2).padded(2), "padding"),
        (lambda: Layout.even(5, 2).padded([3]), "one count for each"),
    ],
)
def test_layouts_that_are_not_whole_say_so(make, words):
    with pytest.raises(InputError, match=words):
        make()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Layout.even(5, 0),
        lambda: Layout.zigzag(5, 0),
        lambda: Layout.even(5, 2).padded([3, 3, 3]),
    ],
)
def test_wrong_number_of_ranks_is_an_input_error(make):
    with pytest.raises(InputError):
        make()


def test_permuted_may_replicate():
    assert Layout.permuted([[0, 2, 1], [0, 3]]).size == 4


def test_padding_of_nothing_is_no_padding():
    assert Layout.even(4, 2).padded(2) == Layout.even(4, 2)


def test_counts_from_numpy_have_the_digest_of_counts_from_python():
    assert digest(Layout.uneven(list(np.asarray([3, 4])))) == digest(Layout.uneven([3, 4]))
