"""A problem that cannot be computed is refused when it is stated."""

import pytest

from weft.core.errors import InputError
from weft.core.indices import EMPTY, Indices
from weft.core.layout import Layout
from weft.core.problem import ITEM_BYTES, Problem


def of(**changes) -> Problem:
    good = {"batch": 1, "heads": 6, "kv_heads": 3, "head_dim": 5, "q": Layout.even(11, 3)}
    return Problem(**{**good, "kv": Layout.even(7, 3), **changes})


def test_kv_heads_of_query_heads_are_those_they_share():
    assert of().kv_heads_of(Indices.of([0, 1])) == Indices.of([0])
    assert of().kv_heads_of(Indices.of([1, 2, 5])) == Indices.of([0, 1, 2])
    assert of().kv_heads_of(EMPTY) == EMPTY
    assert of().all_heads == Indices.span(0, 6)


def test_gradients_live_where_their_tensors_do():
    problem = of()
    assert [problem.home(name).size for name in ("q", "o", "do", "dq")] == [11] * 4
    assert [problem.home(name).size for name in ("kv", "dkv")] == [7] * 2


@pytest.mark.parametrize(("dtype", "item", "sums"), [("float64", 8, 8), ("float32", 4, 4), ("float16", 2, 4)])
def test_sums_are_float32_or_better(dtype, item, sums):
    assert (of(dtype=dtype).item_bytes, of(dtype=dtype).sum_bytes) == (item, sums)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "batch must be ≥ 1, got 0"),
        ({"heads": 0}, "heads must be ≥ 1, got 0"),
        ({"kv_heads": 0}, "kv_heads must be ≥ 1, got 0"),
        ({"head_dim": -1}, "head_dim must be ≥ 1, got -1"),
        ({"kv_heads": 4}, r"6 query heads cannot share 4 .* must be one of \[1, 2, 3, 6\]"),
        ({"kv_heads": 12}, "6 query heads cannot share 12"),
        ({"kv": Layout.even(7, 2)}, "must have the same number of ranks, got 3 and 2"),
        ({"dtype": "int8"}, f"'int8' is not supported. Use one of .*{list(ITEM_BYTES)[-1]}"),
    ],
)
def test_bad_problems_say_what_would_work(changes, words):
    with pytest.raises(InputError, match=words):
        of(**changes)


def test_problem_takes_names_only():
    with pytest.raises(TypeError):
        Problem(1, 2, 2, 4, Layout.even(3, 1), Layout.even(3, 1))
