"""Recipes: what is written is what is meant, or is refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.core.errors import InputError
from weft.train.recipe import Recipe, SparseConfig

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "outlines that count less than nothing": ({"train": {"edges": -1.0}}, ">= 0"),
    "unknown part": ({"modle": {}}, "Did you mean 'model'"),
    "unknown name": ({"train": {"step": 3}}, "Did you mean 'steps'"),
    "text for a number": ({"train": {"steps": "many"}}, "a whole number"),
    "a truth for a number": ({"train": {"batch": True}}, "a whole number"),
    "a fraction of steps": ({"train": {"steps": 1.5}}, "a whole number"),
    "none of the words": ({"data": {"set": "webvid"}}, '"weft-shapes" or "weft-pan"'),
    "two sizes for three": ({"model": {"patch": [2, 8]}}, "3 whole numbers"),
    "a number for a table": ({"train": 3}, "a table"),
    "no steps": ({"train": {"steps": 0}}, ">= 1"),
    "parts that are uneven": ({"train": {"batch": 5, "accumulate": 2}}, "divide"),
    "a folder without a path": ({"data": {"set": "folder"}}, "need data.path"),
    "a path without a folder": ({"data": {"path": "x"}}, "need data.path"),
    "a word for a budget": ({"sparse": {"budget": "most"}}, '"profile" or a number'),
    "more than everything": ({"train": {"ema": 1.5}}, "in [0, 1]"),
    "a batch of a trillion": ({"train": {"batch": 2**40}}, "in [1, 1,048,576]"),
    "a shift that overflows": ({"train": {"logit_mean": 1e300}}, "in [-100.0, 100.0]"),
    "endless frames": ({"data": {"frames": 2**62}}, "in [1, 65,536]"),
    "frames as wide as a city": ({"data": {"size": 2**31}}, "in [1, 16,384]"),
    "clips that vanish": ({"model": {"upscale": 2**62}}, "in [1, 64]"),
    "cubes that overflow": ({"sparse": {"cube": [2**40] * 3}}, "in [1, 65,536]"),
    "cubes of too many tokens": ({"sparse": {"cube": [2**10] * 3}}, "in [1, 65,536]"),
    "blocks of less than one key": ({"sparse": {"block_k": -1}}, "in [1, 65,536]"),
    "a kernel that is not there": ({"parallel": {"backend": "fa5"}}, "auto, exact, flash"),
    "costs of no tokens": ({"sparse": {"cost_tokens": -1}}, "in [0, "),
    "a predictor that unlearns": ({"sparse": {"lr": -1.0}}, ">= 0"),
    "a key of an older version": ({"train": {"optimiser": "muon"}}, "'optimiser' is now 'optimizer'"),
    "a word of an older version": ({"sparse": {"rate": 1e-3}}, "'rate' is now 'lr'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_recipes_are_refused_with_what_would_work(case: str) -> None:
    said, hint = WRONG[case]
    with pytest.raises(InputError) as refused:
        Recipe.of(said)
    assert hint in str(refused.value)


@pytest.mark.parametrize(
    "said", [{"data": {"set": "folder", "path": "x" * 999}}, {"model": {"start": "x" * 999}}]
)
def test_a_name_that_no_file_can_have_is_refused(said: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="too long for a path"):
        Recipe.of(said)


def test_toml_and_python_say_the_same(tmp_path: Path) -> None:
    toml, python = tmp_path / "a.toml", tmp_path / "a.py"
    toml.write_text("[train]\nsteps = 7\nlr = 1\n[sparse]\nbudget = 0.25\ncube = [4, 4, 4]\n")
    python.write_text("recipe = dict(train=dict(steps=7, lr=1.0), sparse=dict(budget=.25, cube=(4, 4, 4)))")
    assert Recipe.load(toml) == Recipe.load(python)
    assert Recipe.load(toml).sparse == SparseConfig(budget=0.25, cube=(4, 4, 4))
    assert Recipe.of(Recipe.load(toml).to_json()) == Recipe.load(toml)


@pytest.mark.parametrize(
    ("name", "text"), [("a.toml", "= 3"), ("a.py", "x = 1"), ("a.yaml", ""), ("gone.toml", None)]
)
def test_files_that_are_no_recipes(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        Recipe.load(tmp_path / name)


@pytest.mark.parametrize(
    "file", sorted(Path(__file__).parents[2].glob("recipes/*.toml")), ids=lambda f: f.stem
)
def test_the_recipes_of_the_repository_are_recipes(file: Path) -> None:
    assert Recipe.load(file).train.steps > 0
