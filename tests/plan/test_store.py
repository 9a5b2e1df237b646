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

from weft.core.errors import InputError
from weft.plan.blocks import Placement
from weft.plan.heads import natural, refined
from weft.plan.store import Key, Store, Stored, default_folder

KEY = Key(model="Wan-AI/Wan2.1-T2V-14B", layer=3, shape=(21, 45, 80), mask="sparge", topology="1x8")
PLAN = Stored(((0, 3), (1, 2)), (9, 5, 4, 0))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "new" / "plans")


def test_what_is_put_is_got(store: Store):
    assert store.get(KEY) is None
    store.put({KEY: PLAN})
    assert store.get(KEY) == PLAN
    assert Store(store.folder).get(KEY) == PLAN
    store.put({KEY: Stored(((0, 1), (2, 3)), PLAN.loads)})
    assert store.get(KEY) == Stored(((0, 1), (2, 3)), PLAN.loads)


@given(loads=st.lists(st.integers(0, 2**60), max_size=20), groups=st.integers(1, 6))
def test_any_plan_survives_the_disk(loads, groups, tmp_path_factory):
    store = Store(tmp_path_factory.getbasetemp() / "any")
    plan = Stored(refined(loads, groups), tuple(loads))
    store.put({KEY: plan})
    assert store.get(KEY) == plan


@given(slices=st.integers(1, 4), ring=st.integers(1, 300), sizes=st.tuples(*[st.integers(0, 40)] * 2))
def test_blocks_survive_the_disk(slices, ring, sizes, tmp_path_factory):
    rng = np.random.default_rng(ring)
    store = Store(tmp_path_factory.getbasetemp() / "blocks")
    blocks = Placement(ring, *(rng.integers(0, ring, (slices, size)) for size in sizes))
    plan = Stored(natural(5, slices), (1,) * 5, blocks)
    store.put({KEY: plan})
    found = store.get(KEY)
    assert found == plan and found != replace(plan, blocks=None)
    assert found.blocks.ring == ring and np.array_equal(found.blocks.dealt.rows, blocks.rows)
    assert hash(found.blocks) == hash(blocks)


def test_a_plan_that_was_stored_without_blocks_is_read(store: Store):
    store.put({KEY: PLAN})
    path = store.folder / KEY.file
    content = json.loads(path.read_text())
    del content["plan"]["blocks"]
    path.write_text(json.dumps(content))
    assert store.get(KEY) == PLAN


@pytest.mark.parametrize(
    "change",
    [{"model": "Wan-AI/Wan2.1"}, {"layer": 4}, {"shape": (21, 45)}, {"mask": "sta"}, {"topology": "2x4"}],
)
def test_every_part_of_the_key_counts(store: Store, change):
    store.put({KEY: PLAN})
    assert store.get(replace(KEY, **change)) is None


def test_file_names_are_harmless(store: Store):
    odd = [replace(KEY, model=model) for model in ("", "../../etc", "a/b c:*?", "é" * 300, "x" * 300)]
    store.put(dict.fromkeys(odd, PLAN))
    assert [store.get(key) for key in odd] == [PLAN] * len(odd)
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
        b'{"format": 0, "plan": "older"}',
        b'{"format": 1}',
        b'{"format": 1, "key": {"kind": "Unheard"}}',
        b'{"format": 1, "key": {"kind": "array"}}',
    ],
)
def test_a_broken_file_is_named_ignored_and_replaced(store: Store, content):
    store.put({KEY: PLAN})
    (store.folder / KEY.file).write_bytes(content)
    with pytest.warns(UserWarning, match=KEY.file):
        assert store.get(KEY) is None
    store.put({KEY: PLAN})
    assert store.get(KEY) == PLAN


@pytest.mark.parametrize(
    ("part", "now"),
    [
        ("plan", {"kind": "Stored", "grouping": [[0, 1], [1]], "loads": [1, 2]}),
        ("plan", {"kind": "Stored", "grouping": [[0], [1]], "loads": [1, 2.5]}),
        ("plan", {"kind": "Stored", "grouping": [[0], [1]], "loads": [1, -2]}),
        ("plan", {"kind": "Stored", "grouping": 3, "loads": []}),
        ("plan", {"kind": "Stored", "grouping": [["0"]], "loads": [1]}),
        ("plan", {"kind": "Stored", "grouping": [], "loads": [], "blocks": 3}),
        ("plan", {"kind": "Placement", "ring": 2, "rows": 3, "cols": 4}),
        ("plan", [[0], [1]]),
        ("key", {"kind": "Key", "model": "m", "layer": 0, "shape": [], "mask": "", "topology": ""}),
        ("format", 2),
    ],
)
def test_a_file_that_holds_something_else_is_ignored(store: Store, part, now):
    store.put({KEY: PLAN})
    path = store.folder / KEY.file
    path.write_text(json.dumps(json.loads(path.read_text()) | {part: now}))
    with pytest.warns(UserWarning, match="is ignored"):
        assert store.get(KEY) is None


@pytest.mark.parametrize(
    "wrong", [(((0,), (0,)), (1, 2)), (((0, 1),), (1,)), (((0,),), (1.0,)), (((0,),), (-1,))]
)
def test_a_plan_that_is_none_cannot_be_stored(wrong):
    with pytest.raises(InputError, match="in one group"):
        Stored(*wrong)


def test_blocks_of_other_slices_cannot_be_stored():
    with pytest.raises(InputError, match="2 groups has blocks of 3 slices"):
        Stored(PLAN.grouping, PLAN.loads, Placement.at_home(3, [0, 1], [0], 2))


def test_the_longest_unused_go_first(store: Store):
    keys = [replace(KEY, layer=layer) for layer in range(6)]
    store.put(dict.fromkeys(keys, PLAN))
    for age, key in enumerate(keys):
        os.utime(store.folder / key.file, (1000 + age, 1000 + age))
    assert store.get(keys[0]) == PLAN  # used just now
    (store.folder / ".died-0123456789abcdef.7.0.json").write_text("half a file")
    os.utime(store.folder / ".died-0123456789abcdef.7.0.json", (1, 1))
    (store.folder / "notes.json").write_text("of someone else " * 1000)
    size = (store.folder / KEY.file).stat().st_size
    new = replace(KEY, layer=6)
    Store(store.folder, limit=3 * size + 2).put({new: PLAN})
    left = {path.name for path in store.folder.iterdir()}
    assert left == {keys[0].file, keys[5].file, new.file, "notes.json"}


def test_writers_and_readers_at_once_never_see_half_a_file(store: Store):
    heads = 400
    plans = [Stored(natural(heads, groups), (groups,) * heads) for groups in range(1, 9)]
    store.put({KEY: plans[0]})

    def work(turn: int) -> bool:
        store.put({KEY: plans[turn % 8]})
        return store.get(KEY) in plans

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(80)))
    assert [path.name for path in store.folder.iterdir()] == [KEY.file]


def test_a_folder_that_cannot_be_written_is_a_warning(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    store = Store(tmp_path / "file")
    with pytest.warns(UserWarning, match="not stored in"):
        store.put({KEY: PLAN})
    with pytest.warns(UserWarning, match="is ignored"):
        assert store.get(KEY) is None


def test_a_write_that_fails_leaves_nothing_behind(store: Store, monkeypatch):
    store.put({KEY: PLAN})

    def full(*_):
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        store.put({KEY: Stored(((0,),), (1,))})
    assert [path.name for path in store.folder.iterdir()] == [KEY.file]
    assert store.get(KEY) == PLAN


def test_the_default_is_the_users_cache(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Store().folder == tmp_path / "weft" / "plans"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_folder() == tmp_path / ".cache" / "weft" / "plans"
