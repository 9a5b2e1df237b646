"""Recipes: every name reads back as itself, and what is no recipe says what would be one."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InputError
from weft.core.mesh import Mesh
from weft.plan.recipe import Recipe, factors


@given(
    st.integers(1, 48),
    st.data(),
    st.sampled_from(["usp", "swapped", "gather"]),
    st.sampled_from(["none", "balanced", "cuts", "zigzag"]),
)
def test_names_read_back(ranks, data, exchange, balance):
    ulysses, ring = data.draw(st.sampled_from(factors(ranks)))
    recipe = Recipe(ulysses, ring, exchange, balance)
    again = Recipe.parse(str(recipe), ranks)
    assert str(again) == str(recipe)
    assert (again.ulysses, again.ring, again.balance) == (ulysses, ring, balance)
    assert ring == 1 or (again.exchange == "gather") == (exchange == "gather")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("ulysses", Mesh.of(ring=1, ulysses=6)),
        ("ring+balanced", Mesh.of(ring=6, ulysses=1)),
        ("zigzag", Mesh.of(ring=6, ulysses=1)),
        ("usp:2x3+cuts", Mesh.of(ring=3, ulysses=2)),
        ("swapped:2x3", Mesh.of(ulysses=2, ring=3)),
        ("gather:3x2", Mesh.of(ring=2, ulysses=3)),
    ],
)
def test_the_inner_axis_runs_fastest(name, mesh):
    assert Recipe.parse(name, 6).mesh == mesh


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("usp:2x2", "needs 4 ranks; there are 6.*usp:1x6, usp:2x3"),
        ("ulises", "no strategy 'ulises'.*ulysses, ring"),
        ("ring+blocks", "no balance 'blocks'.*balanced, cuts"),
        ("usp:0x6", "needs 0 ranks"),
        ("zigzag+balanced", "zigzag is a balance itself"),
        ("zigzag+foo", "no balance 'foo'"),
    ],
)
def test_what_is_no_recipe_says_what_would_be(name, says):
    with pytest.raises(InputError, match=says):
        Recipe.parse(name, 6)
