"""Every value of weft is hashable, and goes through JSON and comes back equal."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given, settings

from tests.cases import cases
from tests.core.samples import LAYOUT, LINK, MASK, MOVE, OPS, PROBLEM, SCHEDULE, WORK, Q
from weft.core.codec import Value, digest, dumps, loads
from weft.core.errors import InputError
from weft.core.indices import EMPTY, Indices
from weft.core.layout import Layout
from weft.core.mask import AnyMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition
from weft.core.problem import Switch
from weft.core.topology import Host, Speed, Topology
from weft.schedule.reverse import reverse

SPEED = Speed(tokens=512.0, density=0.5, block=64, head_dim=64, flops=1e12)
VALUES = [
    LINK,
    SPEED,
    Host(call=5e-5, post=8e-5),
    Topology(name="box", devices=2, inter=LINK, links=((0, 1, LINK),)),
    Mesh.of(ring=2, ulysses=3),
    EMPTY,
    LAYOUT,
    PROBLEM,
    Switch.of(Layout.even(5, 2), Layout.even(3, 2), width=4),
    MASK,
    AnyMask.like(MASK),
    WORK,
    Partition(((WORK,), ()), (Indices.span(0, 5), EMPTY), Indices.of([2])),
    Q,
    MOVE,
    *OPS,
    SCHEDULE,
]
each_value = pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)


def test_no_value_is_forgotten_here():
    kinds = [kind for base in Value.__subclasses__() for kind in (base, *base.__subclasses__())]
    ours = {
        kind.__name__
        for kind in kinds
        if kind.__module__.startswith("weft.core.") and not kind.__name__.startswith("_")
    }
    assert {type(value).__name__ for value in VALUES} == ours


@each_value
def test_values_come_back_from_json_equal_hashable_and_with_equal_digest(value):
    twin = loads(dumps(value))
    assert twin == value
    assert hash(twin) == hash(value)
    assert digest(twin) == digest(value)
    assert type(twin) is type(value)


@each_value
def test_values_are_frozen(value):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, dataclasses.fields(value)[0].name, None)


@each_value
def test_values_print(value):
    assert repr(value)
    assert str(value)


@given(cases(max_tokens=97))
@settings(max_examples=50)
def test_schedules_come_back_from_json_forward_and_backward(case):
    for schedule in (case.schedule, reverse(case.schedule)):
        twin = loads(dumps(schedule))
        assert twin == schedule
        assert twin.ops == schedule.ops
        assert (twin.mask, twin.problem, twin.mesh) == (schedule.mask, schedule.problem, schedule.mesh)


@given(cases(max_tokens=97), cases(max_tokens=97))
@settings(max_examples=50)
def test_digests_are_equal_exactly_when_values_are(a, b):
    assert (digest(a.problem) == digest(b.problem)) == (a.problem == b.problem)
    assert (a.mask.digest == b.mask.digest) == (a.mask == b.mask)


def test_json_is_the_same_text_for_equal_values():
    twin = Topology(links=((0, 0, LINK),), inter=LINK, name="local")
    assert dumps(twin) == dumps(Topology(name="local", inter=LINK, links=((0, 0, LINK),)))
    json.loads(dumps(SCHEDULE))


def test_arrays_keep_dtype_and_shape():
    array = np.arange(6, dtype=np.int32).reshape(2, 3)
    twin = loads(dumps({"a": array}))["a"]
    assert (twin.dtype, twin.tolist()) == (array.dtype, array.tolist())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ('{"kind": "Torus"}', "Unknown kind of value 'Torus'. Known: .*Mesh"),
        ('{"kind": "Mesh", "axes": [], "colour": 3}', "Mesh has no field 'colour'. It has axes"),
        ('{"kind": "Mesh", "axes": [["ring", 0]]}', "'ring' must have size ≥ 1, got 0"),
        ('{"kind": ["Mesh"]}', r"Unknown kind of value \['Mesh'\]"),
        ('{"kind": "array", "dtype": "int8", "shape": [1]}', "An array cannot be read: .*'data'"),
        ('{"kind": "array", "data": "AAAA", "dtype": "int8", "shape": [2]}', "An array cannot be read"),
        ('{"kind": "array", "data": "AAA", "dtype": "int8", "shape": [2]}', "An array cannot be read"),
        ('{"kind": "array", "data": "AAAA", "dtype": "none", "shape": [3]}', "An array cannot be read"),
        (
            '{"kind": "BlockMask", "q_len": 1, "kv_len": 1, "block_q": 1, "block_k": 1, "pattern_of": [0], '
            '"bits": 3}',
            "BlockMask.bits must be an array, got 3.",
        ),
        ("[" * 100_000, "not JSON"),
    ],
)
def test_text_that_is_no_value_is_refused(text, words):
    with pytest.raises(InputError, match=words):
        loads(text)


def test_missing_fields_are_an_input_error():
    with pytest.raises(InputError):
        loads('{"kind": "Mesh"}')
