"""Edges: an upscaler learns what interpolation lacks; a run with one trains small and shows large."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from weft.core.errors import InputError
from weft.train.recipe import Recipe
from weft.train.trainer import train
from weft.video.dataset import HELD_OUT, to_tensor
from weft.video.pipeline import VideoPipeline
from weft.video.shapes import Shapes
from weft.video.upscale import Upscaler, downscaled, fit_upscaler

SAID = {
    "model": {"patch": [2, 8, 8], "upscale": 2, "width": 24, "depth": 1, "heads": 2},
    "data": {"frames": 4, "size": 24, "held_out": 2},
    "train": {"steps": 2, "batch": 2},
    "save": {"every": 2, "samples": 0, "validate": 2},
}


def test_it_learns_edges_and_the_same_each_time() -> None:
    source, made = Shapes(4, 24, 1, 0), []
    for _ in range(2):
        torch.manual_seed(0)
        upscaler = Upscaler(2, 3)
        fit_upscaler(upscaler, source, clips=None, seed=1, steps=40)
        made.append(upscaler)
    video = to_tensor(source.batch(list(range(HELD_OUT, HELD_OUT + 8)))[0])
    small = downscaled(video, 2).flatten(0, 1)
    with torch.no_grad():
        learned, again, plain = (part(small) for part in (*made, Upscaler(2, 3)))
    assert torch.equal(learned, again)
    errors = [F.mse_loss(each, video.flatten(0, 1)).item() for each in (learned, plain)]
    assert errors[0] < 0.85 * errors[1]


def test_a_run_trains_small_and_its_model_shows_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.video.upscale.STEPS", 5)
    assert train(Recipe.of(SAID), tmp_path, live=False) == 2
    pipe = VideoPipeline.load(tmp_path / "model")
    assert pipe.transformer.config.video == (4, 24, 24)
    assert pipe("a red circle", num_inference_steps=1).frames.shape == (1, 4, 24, 24, 3)
    assert pipe.upscaler is not None
    assert pipe.upscaler.layers[-1].weight.abs().max() > 0, "it has learned something"  # type: ignore[union-attr]
    notes = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert any("upscaler" in note.get("text", "") for note in notes)


def test_clips_that_are_held_out_teach_it_nothing() -> None:
    asked = set[int]()

    class Seven(Shapes):
        num_clips = 7  # type: ignore[assignment]

        def batch(self, indices):
            asked.update(indices)
            return super().batch(indices)

    fit_upscaler(Upscaler(2, 3), Seven(4, 24, 1, 0), clips=5, seed=1, steps=10)
    assert asked == {0, 1, 2, 3, 4}


def test_a_run_killed_after_its_last_checkpoint_still_makes_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the same one: how often it was exported before makes no other upscaler."""
    monkeypatch.setattr("weft.video.upscale.STEPS", 5)
    recipe = Recipe.of(SAID | {"save": {"every": 1, "validate": 2}})
    train(recipe, tmp_path / "whole", live=False)

    def killed(*_: object, **__: object) -> float:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("weft.train.artifacts.fit_upscaler", killed)
        train(recipe, tmp_path / "cut", live=False)
    for _ in range(2):
        assert train(recipe, tmp_path / "cut", live=False) == 2
    whole, cut = (VideoPipeline.load(tmp_path / name / "model") for name in ("whole", "cut"))
    for part in ("transformer", "upscaler"):
        ours, theirs = (getattr(pipe, part).state_dict() for pipe in (cut, whole))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    log = [json.loads(line) for line in (tmp_path / "cut" / "log.jsonl").read_text().splitlines()]
    assert [one["step"] for one in log if one["kind"] == "validation"] == [2], "once, not at every start"


def test_latents_are_not_enlarged() -> None:
    data = {"set": "latents", "path": "here"}
    with pytest.raises(InputError, match="upscale must be 1"):
        Recipe.of({**SAID, "data": data})
