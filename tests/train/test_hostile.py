"""Hostile files of a run or of its data: an error in a sentence, or the checkpoint before; never code."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.train.test_trainer import TINY, changed
from weft.core.errors import InputError, WeftError
from weft.train.checkpoints import MANIFEST, Checkpoints
from weft.train.journal import Journal
from weft.train.latent_folder import LatentFolder
from weft.train.recipe import Recipe
from weft.train.sharded_state import Fingerprint
from weft.train.trainer import Trainer, train

DEEP = "[" * 100_000
STATE: dict[str, Any] = {"x": torch.arange(12.0).reshape(3, 4), "count": 7, "name": "a", "pair": (1, 0.5)}


def saved(folder: Path) -> Path:
    """Two checkpoints; the path of the newer one."""
    checkpoints = Checkpoints(folder)
    checkpoints.save(1, STATE)
    checkpoints.save(2, STATE)
    checkpoints.finish()
    return folder / "step-00000002"


def forge(path: Path, name: str, data: bytes) -> None:
    """Replace a file, with the size and the digest that the manifest must have for it."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][name] = Fingerprint.of(path / name)
    (path / MANIFEST).write_text(json.dumps(manifest))


def load(folder: Path, step: int = 2) -> dict[str, Any]:
    state = {"x": torch.zeros(3, 4), "count": 0, "name": "", "pair": (0, 0.0)}
    Checkpoints(folder).load(step, state)
    return state


def manifest_with(**entries: Any) -> Callable[[Path], None]:
    def harm(path: Path) -> None:
        (path / MANIFEST).write_text(json.dumps(json.loads((path / MANIFEST).read_text()) | entries))

    return harm


def manifest_of(data: bytes) -> Callable[[Path], object]:
    return lambda path: (path / MANIFEST).write_bytes(data)


def link(path: Path) -> None:
    (path / "values.json").rename(path.parent / "elsewhere")
    (path / "values.json").symlink_to(path.parent / "elsewhere")


def pipe(path: Path) -> None:
    (path / "values.json").unlink()
    os.mkfifo(path / "values.json")
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"]["values.json"] = [0, ""]
    (path / MANIFEST).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "harm",
    [
        manifest_of(DEEP.encode()),
        manifest_of(b'{"a":' * 100_000),
        manifest_of(b"[]"),
        manifest_of(b"\xff\xfe"),
        manifest_of(b'{"files": {}, "files": {}}'),
        manifest_of(b"9" * 10_000),
        manifest_of(b""),
        manifest_with(files={}),
        manifest_with(files=[1]),
        manifest_with(files={"../../../etc/passwd": [1, "a"]}),
        manifest_with(files={"/etc/passwd": [1, "a"]}),
        manifest_with(files={"values.json": [10**30, "a"]}),
        manifest_with(files={"values.json": [-1, None]}),
        manifest_with(files={"values.json": ["1", "a"]}),
        manifest_with(files={"values.json": {"a": 1}}),
        manifest_with(format="weft checkpoint 99"),
        manifest_with(format=[1]),
        link,
        pipe,
    ],
)
def test_a_hostile_manifest_gives_way_to_the_checkpoint_before(
    harm: Callable[[Path], Any], tmp_path: Path
) -> None:
    harm(saved(tmp_path))
    told: list[str] = []
    assert Checkpoints(tmp_path, notify=told.append).latest() == 1
    assert len(told) == 1 and "step-00000002" in told[0]


def shard(chunks: Any, tensors: dict[str, torch.Tensor] | None = None, **metadata: str) -> bytes:
    """The bytes of a file of tensors with an index of our own."""
    from safetensors.torch import save

    tensors = {"x": STATE["x"]} if tensors is None else tensors
    text = chunks if isinstance(chunks, str) else json.dumps(chunks)
    return save(tensors, {"chunks": text, **metadata})


SHARDS = [
    shard(DEEP), shard("{"), shard([]), shard({}), shard({"y": [[3, 4], [0, 0]]}), shard({"x": 3}),
    shard({"x": [[3, 4], [1, 0]]}), shard({"x": [[3, 4], [-1, 0]]}), shard({"x": [[3, 4], [0]]}),
    shard({"x": [[10**30, 4], [0, 0]]}), shard({"x": [[3, 4], ["0", 0]]}), shard({"x": [[3.0, 4], [0, 0]]}),
    shard({"x": [[6, 4], [0, 0]]}), shard({"x": [[True, 4], [0, 0]]}), shard({"x": [None, None]}),
    shard({"x": [[3, 4], [0, 0]]}, {"x": STATE["x"].double()}), shard({}, {}),
    shard({"x": [[3, 4], [0, 0]]}, {"x": STATE["x"][:2].clone()}),
    b"", b"\xff" * 100, (10**12).to_bytes(8, "little") + b"{}", pickle.dumps({"x": 1}),
]  # fmt: skip


@pytest.mark.parametrize("data", SHARDS, ids=range(len(SHARDS)))
def test_a_forged_file_of_tensors_is_refused(data: bytes, tmp_path: Path) -> None:
    forge(saved(tmp_path), "rank-00000.safetensors", data)
    assert Checkpoints(tmp_path).latest() == 2  # digests prove nothing against who wrote them
    with pytest.raises(InputError, match="step-00000002"):
        load(tmp_path)


def values(**entries: Any) -> bytes:
    return json.dumps({"count": 7, "name": "a", "pair": {"tuple": [1, 0.5]}} | entries).encode()


VALUES = [
    b"", b"[]", DEEP.encode(), b"\xff", values(count="7"), values(count=[7]), values(name=3),
    values(pair=[1]), values(pair={"list": [1, 0.5]}), values(pair={"what": []}),
    values(pair={"tuple": 3}), values(pair={}),
    values(pair={"tuple": ["a", "b"]}), values(count={"tensor": "x"}), values(more=1), b'{"count": 7}',
    values(x=1), values(pair={"a": 1, "b": 2}), values(count={"gpu": [1]}),
]  # fmt: skip


@pytest.mark.parametrize("data", VALUES, ids=range(len(VALUES)))
def test_forged_values_are_refused(data: bytes, tmp_path: Path) -> None:
    forge(saved(tmp_path), "values.json", data)
    with pytest.raises(InputError, match="step-00000002"):
        load(tmp_path)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    forge(saved(tmp_path), "values.json", values(count=9))
    found = load(tmp_path)
    assert (found["count"], found["pair"]) == (9, (1, 0.5)) and torch.equal(found["x"], STATE["x"])


class Canary:
    def __reduce__(self) -> Any:
        return Path.touch, (Path(os.environ["CANARY"]),)


def test_a_checkpoint_in_the_format_of_torch_is_refused_and_not_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CANARY", str(tmp_path / "canary"))
    path = tmp_path / "run" / "checkpoints" / "step-00000003"
    path.mkdir(parents=True)
    files = {".metadata": pickle.dumps(Canary()), "__0_0.distcp": pickle.dumps(Canary())}
    for name, data in files.items():
        (path / name).write_bytes(data)
    prints = {name: Fingerprint.of(path / name) for name in files}
    (path / MANIFEST).write_text(json.dumps({"step": 3, "files": prints}))
    with pytest.raises(InputError, match=r"older weft.* can run code .*Finish that run .*model\.start"):
        train(TINY, tmp_path / "run", live=False)
    assert not (tmp_path / "canary").exists()
    assert (path / MANIFEST).exists()


@pytest.mark.parametrize(
    "text", ["", "{", "[]", DEEP, '{"model": 3}', '{"model": [1]}', '{"train": {}, "train": {}}', "\0", "NaN"]
)
def test_a_damaged_recipe_of_a_run_is_an_error_that_names_it(text: str, tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(text)
    with pytest.raises(InputError, match=r"recipe\.json.* Restore it, or give another --out"):
        train(changed(steps=1), tmp_path, live=False)


@pytest.mark.parametrize(
    "text",
    [
        "steps = " + "[" * 100_000, "train = 3", "[train]\nsteps = 0x" + "f" * 5000, "[train]\nsteps = 1e300",
        "[train]\nlr = nan", "[train]\nsteps = true", "[train]\nseed = -1",
        "[train]\nsteps = 99999999999999999999",
        "[data]\nsize = 1" + "0" * 30, "\xff", "[model]\npatch = [1, 2]",
        "[model]\npatch = []", "[train]\na.b.c = 1",
    ],
)  # fmt: skip
def test_a_hostile_recipe_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match=re.escape(str(tmp_path)) + "|in the recipe"):
        Recipe.load(tmp_path / "a.toml")


def latents(folder: Path, name: str, captions: str) -> None:
    save_file({"latents": torch.zeros(2, 3, 4, 8, 8)}, folder / name, {"captions": captions})


def test_hostile_latents_are_left_out_by_name(tmp_path: Path) -> None:
    latents(tmp_path, "good.safetensors", '["a cat", "a dog"]')
    hostile = {
        "deep": DEEP,
        "short": "[]",
        "kind": "3",
        "items": '[1, {"a": []}]',
        "half": '["\\ud800", "a"]',
    }
    for name, captions in hostile.items():
        latents(tmp_path, f"{name}.safetensors", captions)
    header = json.dumps(
        {"latents": {"dtype": "F32", "shape": [10**18, 10**18], "data_offsets": [-1, 10**30]}}
    )
    (tmp_path / "header.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    (tmp_path / "length.safetensors").write_bytes(b"\xff" * 64)
    (tmp_path / "nested.safetensors").write_bytes((100_000).to_bytes(8, "little") + DEEP.encode())
    found = LatentFolder(tmp_path)
    assert found.num_clips == 2
    left_out = {name.removesuffix(".safetensors") for name, _ in found.skipped}
    assert left_out == {*hostile, "header", "length", "nested"}


@pytest.mark.parametrize("line", [DEEP, '{"step": "a", "kind": 3}', '{"step": 1}', "3", '{"step": {}}', "\0"])
def test_a_hostile_line_of_the_log_does_no_harm(line: str, tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text(f'{line}\n{{"step": 1, "kind": "step"}}\n{line}\n')
    journal = Journal(tmp_path, total=3)
    assert journal.has("step", 1) and not journal.has("end", 1)
    journal.rewind(0)
    journal.write("end", 2)
    journal.close()
    assert json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])["step"] == 2


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        (1e38, r"values up to 1e\+38\. Scale them"),
        (float("nan"), "Its clips have NaN or infinity. Leave those clips out"),
        (1.0, r"Its clips are in order, with values up to 1\. Lower train\.lr"),
    ],
)
def test_a_loss_that_is_no_number_is_told_with_what_was_seen(
    factor: float, said: str, tmp_path: Path
) -> None:
    trainer = Trainer(TINY, tmp_path, live=False)
    plain, trainer._forward_backward = trainer.clips.load, lambda _: float("inf")
    trainer.clips.load = lambda indices: ((found := plain(indices))[0] * factor, found[1])
    with pytest.raises(WeftError, match=f"Step 1: the loss is inf and .*{said}"):
        trainer.run()
    trainer.close()


def test_data_of_1e38_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    huge = {"latents": torch.from_numpy(np.full((6, 4, 3, 24, 24), 1e38, np.float32))}
    save_file(huge, tmp_path / "data" / "a.safetensors", {"captions": json.dumps(["a cat"] * 6)})
    said = TINY.to_json() | {"data": {"set": "latents", "path": str(tmp_path / "data"), "held_out": 1}}
    with pytest.raises(WeftError, match=r"Step 1: .*values up to 1e\+38\. Scale them to about -1 to 1"):
        train(Recipe.of(said), tmp_path / "run", live=False)
