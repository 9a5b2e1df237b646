"""Where pages run: an empty folder with the files that they talk about."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.docs.inputs import Inputs
from tests.docs.small_pipelines import small_defaults


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    return Inputs(tmp_path_factory.mktemp("inputs"))


@pytest.fixture
def enter(inputs: Inputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Make the folder of a page the current one."""

    def enter(page: str, text: str) -> Path:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "recipes").symlink_to(ROOT / "recipes")
        inputs.copy(page, text, tmp_path)
        if "import WanPipeline" in text:
            from diffusers import WanPipeline

            call = inspect.unwrap(WanPipeline.__call__)
            monkeypatch.setattr(call, "__defaults__", small_defaults(call))
        return tmp_path

    return enter
