"""Plans on disk: what is put is got, what is broken is named and left out, and the folder stays small."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.core.codec import to_plain
from weft.core.errors import InputError
from weft.plan.assignment import Assignment
from weft.plan.heads import natural
from weft.plan.plan_store import PlanKey, PlanStore, StoredPlan, default_folder
from weft.plan.split import split, whole

KEY = PlanKey(model="WanTransformer3DModel", shape=(4, 300, 300, 4), sparsity="topk:0.2", topology="1x4")


def plan(layer: int = 3, heads: int = 4, steps: int = 2) -> StoredPlan:
    rows = np.arange(10) % 2
    assignment = Assignment(
        whole(natural(heads, 2)), np.stack([rows, 1 - rows]), np.stack([rows, rows]), 32, 32
    )
    loads = np.arange(steps * heads).reshape(steps, heads)
    return StoredPlan(
        layer=layer, branch=0, strategy="usp:2x2+balanced", assignment=assignment.packed(),
        steps=tuple(range(steps)), loads=loads,
    )  # fmt: skip


def same(found: tuple[StoredPlan, ...], wanted: list[StoredPlan]) -> bool:
    return [to_plain(each) for each in found] == [to_plain(each) for each in wanted]


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    return PlanStore(tmp_path / "new" / "plans")


def test_what_is_put_is_got(store: PlanStore) -> None:
    assert store.get(KEY) == ()
    store.put(KEY, [plan(0), plan(1)])
    assert same(store.get(KEY), [plan(0), plan(1)])
    assert same(PlanStore(store.folder).get(KEY), [plan(0), plan(1)])
    assert store.get(KEY)[0].assignment == plan().assignment


def test_a_layer_takes_the_place_of_its_own_plan_only(store: PlanStore) -> None:
    store.put(KEY, [plan(0), plan(1)])
    store.put(KEY, [plan(1, steps=5), replace(plan(1), branch=1)])
    assert same(store.get(KEY), [plan(0), plan(1, steps=5), replace(plan(1), branch=1)])


@given(
    loads=st.lists(st.lists(st.integers(0, 2**40), min_size=3, max_size=3), min_size=1, max_size=8),
    groups=st.integers(1, 6),
    ring=st.integers(1, 300),
)
def test_any_plan_survives_the_disk(loads, groups, ring, tmp_path_factory) -> None:
    store, random = PlanStore(tmp_path_factory.getbasetemp() / "any"), np.random.default_rng(ring)
    heads = split(loads, groups)
    rows, cols = (random.integers(0, ring, (len(heads), size)) for size in (3, 7))
    assignment = Assignment(heads, rows, cols, 16, 8)
    stored = StoredPlan(
        layer=0, branch=0, strategy="ring", assignment=assignment.packed(),
        steps=(5,), loads=np.array(loads).sum(axis=1)[None],
    )  # fmt: skip
    store.put(KEY, [stored])
    (found,) = store.get(KEY)
    assert found.assignment == assignment and np.array_equal(found.loads, stored.loads)
    assert (found.strategy, found.steps) == ("ring", (5,))


@pytest.mark.parametrize(
    "change", [{"model": "Wan"}, {"shape": (4, 300, 300, 8)}, {"sparsity": "sta"}, {"topology": "2x2"}]
)
def test_every_part_of_the_key_counts(store: PlanStore, change) -> None:
    store.put(KEY, [plan()])
    assert store.get(replace(KEY, **change)) == ()


def test_file_names_are_harmless(store: PlanStore) -> None:
    odd = [replace(KEY, model=model) for model in ("", "../../etc", "a/b c:*?", "é" * 300, "x" * 300)]
    for key in odd:
        store.put(key, [plan()])
    assert all(same(store.get(key), [plan()]) for key in odd)
    assert len(list(store.folder.iterdir())) == len(odd)
    assert all(len(path.name) < 100 for path in store.folder.iterdir())


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"null",
        b"[" * 100_000,
        b'{"format": 2, "plans": "older"}',
        b'{"format": 3}',
        b'{"format": 3, "key": {"kind": "Unheard"}}',
        b'{"format": 3, "key": {"kind": "array"}}',
    ],
)
def test_a_broken_file_is_named_ignored_and_replaced(store: PlanStore, content) -> None:
    store.put(KEY, [plan()])
    (store.folder / KEY.file).write_bytes(content)
    with pytest.warns(UserWarning, match=KEY.file):
        assert store.get(KEY) == ()
    with pytest.warns(UserWarning, match=KEY.file):
        store.put(KEY, [plan(7)])
    assert same(store.get(KEY), [plan(7)])


GOOD = to_plain(plan())
ARRAY = {"kind": "array", "dtype": "float64", "shape": [2, 4], "data": "A" * 84 + "AA=="}
ASSIGNMENT = GOOD["assignment"]


@pytest.mark.parametrize(
    ("part", "now"),
    [
        ("plans", [{**GOOD, "loads": ARRAY}]),
        ("plans", [{**GOOD, "loads": 3}]),
        ("plans", [{**GOOD, "steps": [1]}]),
        ("plans", [{**GOOD, "steps": ["a", "b"]}]),
        ("plans", [{**GOOD, "layer": "0"}]),
        ("plans", [{**GOOD, "assignment": 3}]),
        ("plans", [{**GOOD, "assignment": {**ASSIGNMENT, "rows": ARRAY}}]),
        ("plans", [{**GOOD, "assignment": {**ASSIGNMENT, "heads": [[]]}}]),
        ("plans", [{**GOOD, "assignment": {**ASSIGNMENT, "heads": [[3], [4]]}}]),
        ("plans", [{**GOOD, "surplus": 1}]),
        ("plans", [ASSIGNMENT]),
        ("plans", [[0], [1]]),
        ("plans", GOOD),
        ("key", {**to_plain(KEY), "model": "another"}),
        ("format", 4),
    ],
)
def test_a_file_that_holds_something_else_is_ignored(store: PlanStore, part, now) -> None:
    store.put(KEY, [plan()])
    path = store.folder / KEY.file
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: now}))
    with pytest.warns(UserWarning, match="are ignored"):
        assert store.get(KEY) == ()


def test_a_pipe_in_the_place_of_a_file_does_not_block(store: PlanStore) -> None:
    store.put(KEY, [plan()])
    (store.folder / KEY.file).unlink()
    os.mkfifo(store.folder / KEY.file)
    with pytest.warns(UserWarning, match="not a regular file"):
        assert store.get(KEY) == ()


@pytest.mark.parametrize(
    "loads", [np.zeros((1, 4), int), np.zeros((2, 3), int), np.full((2, 4), -1), np.ones((2, 4))]
)
def test_loads_that_are_none_cannot_be_stored(loads) -> None:
    with pytest.raises(InputError, match="steps of 4 heads"):
        replace(plan(), loads=loads)


def test_the_longest_unused_go_first(store: PlanStore) -> None:
    keys = [replace(KEY, topology=f"{number}") for number in range(6)]
    for age, key in enumerate(keys):
        store.put(key, [plan()])
        os.utime(store.folder / key.file, (1000 + age, 1000 + age))
    assert store.get(keys[0])  # used just now
    (store.folder / ".died-0123456789abcdef.7.0.json").write_text("half a file")
    os.utime(store.folder / ".died-0123456789abcdef.7.0.json", (1, 1))
    (store.folder / "notes.json").write_text("of someone else " * 1000)
    size = (store.folder / keys[0].file).stat().st_size
    new = replace(KEY, topology="6")
    PlanStore(store.folder, limit=3 * size + 2).put(new, [plan()])
    left = {path.name for path in store.folder.iterdir()}
    assert left == {keys[0].file, keys[5].file, new.file, "notes.json"}


def test_writers_and_readers_at_once_never_see_half_a_file(store: PlanStore) -> None:
    plans = [plan(heads=4 * number, steps=30) for number in range(1, 9)]
    store.put(KEY, [plans[0]])

    def work(turn: int) -> bool:
        store.put(KEY, [plans[turn % 8]])
        found = store.get(KEY)
        return any(same(found, [each]) for each in plans)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(80)))
    assert [path.name for path in store.folder.iterdir()] == [KEY.file]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    store = PlanStore(tmp_path / "file")
    with pytest.warns(UserWarning, match="not stored in"):
        store.put(KEY, [plan()])
    assert store.get(KEY) == ()


def test_a_write_that_fails_leaves_nothing_behind(store: PlanStore, monkeypatch) -> None:
    store.put(KEY, [plan()])

    def full(*_) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        store.put(KEY, [plan(9)])
    assert [path.name for path in store.folder.iterdir()] == [KEY.file]
    assert same(store.get(KEY), [plan()])


def test_the_default_is_the_users_cache(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv("WEFT_PLANS")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert PlanStore().folder == tmp_path / "weft" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "weft" / "plans"


def test_the_environment_names_a_folder_or_turns_it_off(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_PLANS", str(tmp_path / "mine"))
    PlanStore().put(KEY, [plan()])
    assert same(PlanStore(tmp_path / "mine").get(KEY), [plan()])
    monkeypatch.setenv("WEFT_PLANS", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    PlanStore().put(KEY, [plan()])
    assert PlanStore().get(KEY) == () and not (tmp_path / "cache").exists()
