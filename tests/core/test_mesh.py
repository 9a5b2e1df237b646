"""Ranks on named axes, the last one running fastest."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.errors import InputError
from weft.core.mesh import Mesh

meshes = st.dictionaries(st.sampled_from(["ring", "ulysses", "batch"]), st.integers(1, 5)).map(
    lambda axes: Mesh.of(**axes)
)


@given(meshes)
def test_coordinates_and_ranks_are_inverse(mesh):
    assert mesh.ranks == math.prod(size for _, size in mesh.axes)
    assert [mesh.rank(**mesh.coordinate(rank)) for rank in range(mesh.ranks)] == list(range(mesh.ranks))


@given(meshes, st.sampled_from(["ring", "ulysses", "nowhere"]))
def test_groups_part_the_ranks_and_differ_along_one_axis_only(mesh, axis):
    groups = mesh.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.ranks))
    for group in groups:
        assert [mesh.coordinate(rank).get(axis, 0) for rank in group] == list(range(mesh.size(axis)))
        others = [{**mesh.coordinate(rank), axis: 0} for rank in group]
        assert others == others[:1] * len(others)


def test_last_axis_runs_fastest():
    mesh = Mesh.of(ring=2, ulysses=3)
    assert mesh.groups("ulysses") == ((0, 1, 2), (3, 4, 5))
    assert mesh.groups("ring") == ((0, 3), (1, 4), (2, 5))
    assert str(mesh) == "ring 2 × ulysses 3"


def test_axis_that_is_not_there_is_one_rank_long():
    assert Mesh.of(ring=3).size("ulysses") == 1
    assert Mesh.of(ring=3).rank() == 0


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Mesh((("ring", 2), ("ring", 3))), "repeat a name"),
        (lambda: Mesh.of(ring=0), "'ring' must have size ≥ 1, got 0"),
        (lambda: Mesh.of(ring=3).coordinate(3), "Rank 3 is not on ring 3. Ranks run from 0 to 2"),
        (lambda: Mesh.of(ring=3).coordinate(-1), "Rank -1"),
        (lambda: Mesh.of(ring=3).rank(torus=1), "no axis 'torus'"),
    ],
)
def test_bad_meshes_say_which_rule_they_break(make, words):
    with pytest.raises(InputError, match=words):
        make()


def test_coordinate_beyond_its_axis_is_refused():
    with pytest.raises(InputError):
        Mesh.of(ring=2, ulysses=3).rank(ulysses=3)
