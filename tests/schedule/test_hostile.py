"""Files of schedules that somebody has changed: each is a valid schedule or an InputError."""

from __future__ import annotations

import copy
import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cases import random_case
from weft.core.codec import dumps, loads
from weft.core.errors import InputError, ScheduleError, WeftError
from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.core.problem import Switch
from weft.core.schedule import Schedule
from weft.schedule.reverse import reverse
from weft.schedule.switch import switch
from weft.schedule.verify import verify

MUTATIONS = 2000
LARGE = 64 << 20
"""Bytes; the files have a few thousand."""
NUMBERS = [
    0, -1, 1, 2, 3, 255, 2**31, 2**40, 2**63 - 1, 2**63, 10**30, -(10**30), 1.5, -0.0, 1e308,
    float("nan"), float("inf"), True, False,
]  # fmt: skip
OTHERS: list[Any] = [
    None, "", "q", "kv", "x", "../../etc/passwd", "\0", "ä" * 999, [], {}, [[]], [0], [[0, 1]], [[1, 0]],
    {"kind": "Mesh"}, {"kind": "array"}, {"kind": "Indices", "runs": [[5, 3]]}, {"kind": 3},
]  # fmt: skip


def schedules() -> list[Schedule]:
    rng = np.random.default_rng(22)
    found = [random_case(rng, max_tokens=40, max_ranks=4).schedule for _ in range(5)]
    found += [reverse(found[0], keep="all"), reverse(found[1], keep="none")]
    time, space = Layout.even(7, 3, dim="time"), Layout.even(5, 3, dim="space")
    found += [switch(Switch.of(time, space, width=8)), reverse(switch(Switch.of(time, width=8)))]
    return found


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All (container, key) of a JSON value."""
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        yield from places(value[key])


def nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value]
    return value


def mutate(rng: random.Random, plain: Any) -> str:
    """One to three changes: another value, another type, nothing, twice, cut off, deeper."""
    plain = copy.deepcopy(plain)
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        table, key = rng.choice(list(places(plain)) or [([0], 0)])
        match rng.randrange(7):
            case 0 | 1:
                table[key] = rng.choice(NUMBERS)
            case 2:
                table[key] = copy.deepcopy(rng.choice(OTHERS))
            case 3:
                del table[key]
            case 4:
                table[key] = nested(table[key], rng.choice([1, 2, 50, 90]))
            case 5 if isinstance(table[key], list):
                table[key] = table[key][: len(table[key]) // 2] * rng.choice([1, 2, 30])
            case 6:
                table[key] = copy.deepcopy(rng.choice(list(places(plain))[:1] + [(table, key)])[0])
    text = json.dumps(plain)
    return text[: rng.randrange(len(text))] if rng.random() < 0.02 else text


def outcome(path: Path) -> str:
    """Of `Schedule.load` and `verify`; anything but weft's own errors is raised."""
    try:
        schedule = Schedule.load(path)
    except InputError as error:
        assert str(path) in str(error)
        return "refused"
    try:
        verify(schedule)
    except ScheduleError:
        return "unsound"
    return "valid"


def test_changed_files_are_valid_or_refused(tmp_path: Path) -> None:
    rng, path, seen = random.Random(22), tmp_path / "changed.json", dict[str, int]()
    originals = [json.loads(dumps(each)) for each in schedules()]
    for number in range(MUTATIONS):
        path.write_text(mutate(rng, originals[number % len(originals)]))
        tracemalloc.start()
        try:
            said = outcome(path)
        finally:
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert peak < LARGE, path.read_text()
        seen[said] = seen.get(said, 0) + 1
    assert seen["refused"] > MUTATIONS / 2 and seen["valid"] and seen["unsound"]


def test_schedules_that_are_not_changed_are_valid(tmp_path: Path) -> None:
    for schedule in schedules():
        (tmp_path / "same.json").write_text(dumps(schedule))
        assert Schedule.load(tmp_path / "same.json") == schedule
        assert outcome(tmp_path / "same.json") == "valid"


def changed(**fields: Any) -> str:
    plain = json.loads(dumps(schedules()[0]))
    for name, value in fields.items():
        *path, last = name.split("__")
        table = plain
        for key in path:
            table = table[key]
        table[last] = value
    return json.dumps(plain)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        (changed(mesh__axes=[["ring", 10**30]]), "Mesh.axes"),
        (
            changed(mesh__axes=[["ring", 2**30], ["ulysses", 2**30]]),
            "ranks, got 1,152,921,504,606,846,976",
        ),
        (changed(mesh__axes=[["ring", 7]]), "mesh ranks is 7"),
        (changed(problem__batch=True), "Problem.batch"),
        (changed(problem__head_dim=2**60), "head_dim"),
        (changed(problem__q__size=2**60), "got 1,152,921,504,606,846,976"),
        (changed(mask__q_len=-1), "-1"),
        (changed(mask__bits={"kind": "array", "dtype": "O", "shape": [1], "data": ""}), "dtype"),
        (changed(name=3), "Schedule.name"),
        (changed(ops=3), "Schedule.ops"),
        (changed(kept=[[]] * 9), r"len\(kept\)"),
        ("[" * 100_000, "nested too deeply"),
        ('{"kind": "Schedule", "kind": "Mesh"}', "duplicate key 'kind'"),
        ('{"kind": "Mesh", "axes": []}', "must hold a Schedule, got a Mesh"),
        ("9" * 5000, "digits"),
        ("", "not JSON"),
        (json.dumps({"kind": "x" * 99_999}), "Unknown kind of value"),
        (changed(name={"kind": "array", "dtype": "uint8", "shape": [2, 1], "data": "AAA="}), "Schedule.name"),
        (changed(mask__pattern_of=[10**6] * 9999), "pattern_of"),
    ],
)
def test_the_message_names_the_field(text: str, field: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(InputError, match=field) as refused:
        Schedule.load(tmp_path / "a.json")
    assert len(str(refused.value)) < 1000 and "\n" not in str(refused.value)


def test_a_file_that_is_no_text_or_no_file(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe{}")
    for path, said in (
        (tmp_path / "a.json", "utf-8"),
        (tmp_path, "regular"),
        (tmp_path / "b", "No such file"),
    ):
        with pytest.raises(InputError, match=said):
            Schedule.load(path)


@pytest.mark.parametrize(
    "value",
    [schedules()[0].mask, Mesh.of(ring=2, ulysses=3), schedules()[0].problem, schedules()[-1].problem],
)
def test_other_values_are_valid_or_refused(value: Any) -> None:
    rng, plain, refused = random.Random(7), json.loads(dumps(value)), 0
    for _ in range(500):
        try:
            loads(mutate(rng, plain))
        except InputError:
            refused += 1
        except WeftError as error:
            raise AssertionError(error) from error
    assert refused > 100
