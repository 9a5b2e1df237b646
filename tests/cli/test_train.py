"""`weft train`: what it hands to the trainer; training itself is tested in tests/train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.cli.main import main
from weft.core.errors import InputError

RECIPE = """
[model]
patch = [2, 8, 8]
width = 24
depth = 2
heads = 2
[data]
frames = 4
size = 24
held_out = 2
[train]
steps = 6
batch = 2
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(RECIPE)
    return path


def ended(*words: object) -> object:
    with pytest.raises(SystemExit) as end:
        main(["train", *map(str, words)])
    return end.value.code


def test_a_recipe_becomes_a_model_in_the_folder_of_its_name(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert ended(recipe, "--steps", "1", "--quiet") == 0
    assert (tmp_path / "runs" / "tiny" / "model" / "config.json").is_file()
    assert '"step": 1' in (tmp_path / "runs" / "tiny" / "log.jsonl").read_text()


def test_several_ranks_are_launched_with_this_command(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("weft.cli.ranks.launched", lambda ranks, _, grace: asked.append((ranks, grace)) or 7)
    assert ended(recipe, "--ranks", "3") == 7
    assert asked == [(3, 600)], "a step and its checkpoint have time to end"


def test_a_backend_is_checked_and_replaces_that_of_the_recipe(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(
        "weft.train.trainer.train", lambda recipe, *_, **__: asked.append(recipe.parallel.backend)
    )
    for options in ((), ("--backend", "triton")):
        assert ended(recipe, *options, "--out", tmp_path) == 0
    assert asked == ["auto", "triton"]
    assert ended(recipe, "--backend", "fa5") == 2
    assert "Use one of auto, exact, flash" in capsys.readouterr().err


def test_no_ranks_train_nothing(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ended(recipe, "--ranks", "0") == 2
    assert "--ranks must be >= 1, got 0." in capsys.readouterr().err


def test_under_a_launcher_the_reason_is_the_exit_of_the_rank(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise InputError("The folder has another run.", hint="Give another --out.")

    monkeypatch.setattr("weft.train.trainer.train", refuses)
    monkeypatch.setattr("weft.run.world.is_launched", lambda: True)
    assert ended(recipe, "--ranks", "2") == "weft: The folder has another run.\nGive another --out."
