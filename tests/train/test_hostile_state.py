"""What a resumed run reads: saved only if it can be loaded, removed only here, refused in a sentence."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.train.test_hostile import forge, saved
from tests.train.test_trainer import changed
from weft.core.errors import InputError, WeftError
from weft.train import checkpoints as module
from weft.train import dsv, sharded_state, trainer
from weft.train.attention_cost import AttentionCost
from weft.train.checkpoints import MANIFEST, Checkpoints
from weft.train.dispatcher import Dispatcher
from weft.train.journal import Journal
from weft.train.latent_folder import LatentFolder
from weft.train.recipe import SparseConfig
from weft.train.trainer import train
from weft.train.video_folder import VideoFolder


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def test_values_larger_than_other_json_files_are_loaded(tmp_path: Path) -> None:
    text = "a" * (65 << 20)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"text": text})
    state = {"text": ""}
    checkpoints.load(1, state)
    assert state["text"] == text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("a" * 2000, "Values are 2,"),
        (nested(70), "deep"),
        ("\ud800", "not JSON"),
        ([torch.zeros(1)], "contains a tensor"),
        (np.zeros(1), "contains a tensor"),
    ],
)
def test_values_that_could_not_be_loaded_are_not_saved(
    value: Any, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharded_state, "MAX_VALUES_BYTES", 1000)
    with pytest.raises(InputError, match=reason):
        Checkpoints(tmp_path).save(1, {"value": value})
    assert not list(tmp_path.iterdir())


def test_names_are_on_the_disk_before_an_older_checkpoint_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, remove = os.fsync, module._remove
    monkeypatch.setattr(
        os, "fsync", lambda fd: (events.append(Path(f"/proc/self/fd/{fd}").resolve().name), sync(fd))
    )
    monkeypatch.setattr(module, "_remove", lambda path: (events.append(f"remove {path.name}"), remove(path)))
    checkpoints = Checkpoints(tmp_path, keep=1)
    for step in (1, 2):
        checkpoints.save(step, {"x": torch.zeros(2)})
    checkpoints.finish()
    assert events[-3:] == ["step-00000002", tmp_path.name, "remove step-00000001"]


def test_of_a_linked_checkpoint_only_the_link_is_removed(tmp_path: Path) -> None:
    elsewhere = saved(tmp_path / "other")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").symlink_to(elsewhere)
    checkpoints = Checkpoints(tmp_path / "run", keep=1)
    checkpoints.save(3, {"x": torch.zeros(2)})
    checkpoints.finish()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["step-00000003"]
    assert (elsewhere / MANIFEST).exists()


def test_the_settings_of_the_optimizer_are_those_of_the_recipe(tmp_path: Path) -> None:
    train(changed(steps=1), tmp_path, live=False)
    path = tmp_path / "checkpoints" / "step-00000001"
    values = json.loads((path / "values.json").read_text())
    values["optimiser.param_groups"]["list"][0]["dict"]["betas"] = None
    del values["optimiser.param_groups"]["list"][1]
    forge(path, "values.json", json.dumps(values).encode())
    assert train(changed(steps=2), tmp_path, live=False) == 2


BLOCK = {
    "needed": [0.5, 0.5], "coverage": 0.9, "ready": True, "since": 1, "sparse": True, "whole": [True, False],
    "budgets": [0.5, 1.0],
}  # fmt: skip
COSTS = {
    "tokens": 8,
    "heads": 2,
    "ranks": 1,
    "full": 1.0,
    "head": 0.1,
    "share": 0.1,
    "select": 0.1,
    "plan": 0.0,
}
STATE: dict[str, Any] = {"step": 3, "costs": COSTS, "blocks": [BLOCK]}


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("step",), "a"), (("step",), None), (("costs",), 3), (("costs", "ranks"), 0),
        (("costs", "full"), "a"), (("costs", "heads"), None),
        (("costs", "plan"), float("inf")), (("costs", "plan"), 10**30), (("blocks",), []), (("blocks",), {}),
        (("blocks", 0), None), (("blocks", 0, "needed"), [0.5]), (("blocks", 0, "needed"), [float("nan"), 1]),
        (("blocks", 0, "needed"), ["a", "b"]), (("blocks", 0, "whole"), [[True], [False]]),
        (("blocks", 0, "budgets"), 1.0), (("blocks", 0, "coverage"), "much"), (("blocks", 0, "since"), None),
        (("blocks", 0, "sparse"), 1), (("blocks", 0, "other"), 1),
    ],
)  # fmt: skip
def test_a_hostile_state_of_the_dispatcher_is_refused(path: tuple[Any, ...], value: Any) -> None:
    dispatcher, state = Dispatcher(SparseConfig(), layers=1, heads=2), copy.deepcopy(STATE)
    dispatcher.load_state_dict(state)
    assert json.loads(json.dumps(dispatcher.state_dict())) == STATE and dispatcher.costs == AttentionCost(
        **COSTS
    )
    *parents, last = path
    table: Any = state
    for key in parents:
        table = table[key]
    table[last] = value
    with pytest.raises(InputError):
        dispatcher.load_state_dict(state)


@pytest.mark.parametrize(
    "plan", [3, [], [[0.5, 0.5]], [["a", "b"], "ring"], [[0.5], "ring"], [[0.5, 0.5], 3]]
)
def test_hostile_plans_are_refused(plan: Any) -> None:
    assert dsv._checked_plans({"layer 0": [[0.5, 0.5], "ring"]}, 2)
    with pytest.raises(InputError):
        dsv._checked_plans({"layer 0": plan}, 2)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("alloc: can't allocate memory: 9 bytes\nat")])
def test_memory_that_is_not_there_is_told(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(trainer, "Trainer", fail)
    with pytest.raises(WeftError, match=r"not enough memory: .*Lower train\.batch"):
        train(changed(steps=1), tmp_path, live=False)


def test_pipes_in_place_of_files_do_not_block(tmp_path: Path) -> None:
    for name in ("log.jsonl", "a.safetensors", "a.mp4"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(InputError, match=r"log\.jsonl is not a regular file"):
        Journal(tmp_path, total=1)
    with pytest.raises(InputError, match="not a regular file"):
        LatentFolder(tmp_path)
    (tmp_path / "captions.jsonl").write_text('{"file": "a.mp4", "caption": "a cat"}\n')
    with pytest.raises(InputError, match="not a regular file"):
        VideoFolder(tmp_path, frames=1, size=8)
    latents = {"latents": torch.zeros(1, 3, 4, 8, 8)}
    save_file(latents, tmp_path / "b.safetensors", {"captions": '["a cat"]'})
    assert LatentFolder(tmp_path).num_clips == 1
