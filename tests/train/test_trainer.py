"""The trainer on one rank; on several, and killed, it is tested in tests/distributed/test_resume.py."""

from __future__ import annotations

import json
import math
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from weft.core.errors import InputError, WeftError
from weft.generate import pretrained
from weft.train.data import ClipLoader
from weft.train.optimizer import lr_at
from weft.train.recipe import Recipe, TrainConfig
from weft.train.trainer import Trainer, train
from weft.video.pipeline import VideoPipeline
from weft.video.shapes import Shapes

TINY = Recipe.of(
    {
        "model": {"patch": [2, 8, 8], "width": 24, "depth": 2, "heads": 2},
        "data": {"frames": 4, "size": 24, "held_out": 2},
        "train": {"steps": 6, "batch": 4, "warmup": 2},
        "save": {"every": 3, "samples": 6, "validate": 3, "prompts": ["a red circle moving left"]},
    }
)


def log(folder: Path, kind: str = "step") -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def changed(**train_part: Any) -> Recipe:
    return replace(TINY, train=replace(TINY.train, **train_part))


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "whole"
    assert train(TINY, folder, live=False) == 6
    return folder


def test_a_run_leaves_a_log_samples_and_a_model(done: Path) -> None:
    assert [line["step"] for line in log(done)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in log(done, "validation")] == [3, 6]
    assert (done / log(done, "sample")[0]["file"]).is_file()
    frames = VideoPipeline.load(done / "model")("a red circle", num_inference_steps=2).frames
    assert frames.shape == (1, 4, 24, 24, 3)
    assert np.isfinite(frames).all()


def stopped(recipe: Recipe, folder: Path) -> Path:
    """The same run, told to stop in its fourth step, and gone on with."""
    trainer = Trainer(recipe, folder, live=False)
    plain = trainer._forward_backward

    def interrupted(step: int) -> float:
        if step == 4:
            signal.raise_signal(signal.SIGINT)
        return plain(step)

    trainer._forward_backward = interrupted
    assert trainer.run() == 4
    trainer.close()
    assert train(recipe, folder, live=False) == 6
    return folder


def check_same(ours: Path, theirs: Path) -> None:
    assert [line["loss"] for line in log(ours)] == [line["loss"] for line in log(theirs)]
    a, b = (VideoPipeline.load(folder / "model").transformer.state_dict() for folder in (ours, theirs))
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_that_was_stopped_goes_on_bit_for_bit(done: Path, tmp_path: Path) -> None:
    check_same(stopped(TINY, tmp_path), done)


def test_half_precision_goes_on_bit_for_bit_with_muon_and_predictors(tmp_path: Path) -> None:
    """Only what is computed in a step is halved: weights, moments, averages and predictors are not."""
    part = {"cube": (2, 1, 1), "rows": 8, "stage1": 1, "profile_rarely": 2, "gate": 1.0, "budget": 0.5}
    half = changed(dtype="bfloat16", optimizer="muon")
    recipe = replace(half, sparse=Recipe.of({"sparse": part}).sparse)
    train(recipe, tmp_path / "whole", live=False)
    check_same(stopped(recipe, tmp_path / "cut"), tmp_path / "whole")
    assert any(line["mode"] == "sparse" for line in log(tmp_path / "whole", "sparsity"))
    trainer = Trainer(recipe, tmp_path / "cut", live=False)
    try:
        trainer._begin()
        kept = [x for x in tree_leaves(trainer.state()) if isinstance(x, torch.Tensor)]
    finally:
        trainer.close()
    assert {x.dtype for x in kept} == {torch.float32}


def test_parts_of_a_step_add_up(done: Path, tmp_path: Path) -> None:
    train(changed(accumulate=2), tmp_path, live=False)
    for ours, whole in zip(log(tmp_path), log(done), strict=True):
        assert ours["loss"] == pytest.approx(whole["loss"], rel=1e-5)
        assert ours["norm"] == pytest.approx(whole["norm"], rel=1e-4)


def test_checkpointing_and_bfloat16_train_alike(done: Path, tmp_path: Path) -> None:
    train(changed(checkpointing=True), tmp_path / "again", live=False)
    train(changed(dtype="bfloat16"), tmp_path / "half", live=False)
    for again, half, whole in zip(log(tmp_path / "again"), log(tmp_path / "half"), log(done), strict=True):
        assert again["loss"] == pytest.approx(whole["loss"], rel=1e-6)
        assert half["loss"] == pytest.approx(whole["loss"], rel=0.02)


def test_a_step_stays_on_the_device_of_its_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta stands for a GPU: what does not move there meets what did, and torch refuses."""
    monkeypatch.setattr("weft.train.trainer.device", lambda: torch.device("meta"))
    trainer = Trainer(TINY, tmp_path, live=False)
    try:
        loss = trainer._loss(1, slice(0, 2))
        loss.backward()
    finally:
        trainer.close()
    met = [loss, *trainer.model.parameters(), *(weight.grad for weight in trainer.model.parameters())]
    assert {x.device.type for x in (*met, *trainer.ema.values()) if x is not None} == {"meta"}


def test_a_run_goes_on_that_is_older_than_an_option(done: Path, tmp_path: Path) -> None:
    folder = tmp_path / "older"
    shutil.copytree(done, folder)
    said = json.loads((folder / "recipe.json").read_text())
    assert said["train"].pop("optimizer") == "adamw"
    said["train"]["rate"] = said["train"].pop("lr")  # as it was called then
    (folder / "recipe.json").write_text(json.dumps(said))
    assert train(TINY, folder, live=False) == 6


def test_a_model_without_the_coarse_branch_of_its_training_is_only_to_begin_with(tmp_path: Path) -> None:
    sparse = {"cube": (2, 2, 2), "rows": 8, "coarse": True}
    coarse = replace(changed(steps=1), sparse=Recipe.of({"sparse": sparse}).sparse)
    train(coarse, tmp_path / "coarse", live=False)
    model = tmp_path / "coarse" / "model"
    for refuses in (pretrained.check, pretrained.load_pipeline, VideoPipeline.load):
        with pytest.raises(InputError, match="trained with a coarse branch .* without"):
            refuses(model)
    (note,) = log(tmp_path / "coarse", "note")
    assert "model/ is saved without a coarse branch" in note["text"]
    begun = replace(changed(steps=1), model=replace(TINY.model, start=str(model)))
    train(begun, tmp_path / "plain", live=False)
    pretrained.check(tmp_path / "plain" / "model")
    VideoPipeline.load(tmp_path / "plain" / "model")


def test_another_recipe_does_not_go_on_in_the_same_folder(done: Path) -> None:
    with pytest.raises(InputError, match=r"\[train\]"):
        train(changed(lr=0.5), done, live=False)


def test_a_loss_that_is_no_number_ends_the_run_before_it_spoils_the_weights(tmp_path: Path) -> None:
    trainer = Trainer(TINY, tmp_path, live=False)
    trainer._forward_backward = lambda _: math.nan
    with pytest.raises(WeftError, match="Step 1"):
        trainer.run()
    trainer.close()
    assert trainer.done == 0


def test_the_rate_rises_and_falls() -> None:
    part = TrainConfig(steps=100, warmup=10, lr=2.0, floor=0.1)
    rates = [lr_at(part, step) for step in range(1, 101)]
    assert rates[0] == pytest.approx(0.2)
    assert max(rates) == rates[9] == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert all(a >= b for a, b in zip(rates[9:], rates[10:], strict=False))


class Ten(Shapes):
    """A set that ends."""

    num_clips = 10  # type: ignore[assignment]


def test_each_epoch_has_every_clip_once_and_none_that_is_held_out() -> None:
    clips = ClipLoader(Ten(2, 8), batch=4, held_out=2, seed=0)
    seen = [index for step in range(1, 5) for index in clips.indices(step)]
    assert sorted(seen[:8]) == sorted(seen[8:]) == list(range(8))
    assert seen[:8] != seen[8:]
    assert list(clips.held_out) == [8, 9]
    clips.close()
    with pytest.raises(InputError, match="held_out"):
        ClipLoader(Ten(2, 8), batch=4, held_out=10, seed=0)
