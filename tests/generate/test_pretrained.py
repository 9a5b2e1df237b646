"""Hub ids are found in the cache of the Hub, and nothing is downloaded."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.core.errors import InputError
from weft.generate.pretrained import INDEX, locate
from weft.video.saved_model import name_of


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one revision of one model."""
    hub = pytest.importorskip("huggingface_hub", reason="ids need huggingface_hub")
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path))
    model, commit = tmp_path / "models--me--tiny-video", "0" * 40
    for folder in ("refs", "blobs", f"snapshots/{commit}"):
        (model / folder).mkdir(parents=True)
    (model / "refs" / "main").write_text(commit)
    (model / "snapshots" / commit / INDEX).write_text('{"_class_name": "WanPipeline"}')
    return model / "snapshots" / commit


def test_downloaded_model_is_found_by_its_id(cache: Path) -> None:
    assert locate(Path("me/tiny-video")) == cache
    assert name_of(cache) == "me/tiny-video"


def test_model_that_was_not_downloaded_is_refused_with_the_command(cache: Path) -> None:
    with pytest.raises(InputError, match="me/other is neither") as refused:
        locate(Path("me/other"))
    assert refused.value.hint == "Download it first: hf download me/other"
    (cache / INDEX).unlink()
    with pytest.raises(InputError, match="is not a Diffusers checkpoint directory"):
        locate(Path("me/tiny-video"))


def test_folder_goes_before_an_id(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    own = Path("me") / "tiny-video"
    own.mkdir(parents=True)
    (own / INDEX).write_text((cache / INDEX).read_text())
    assert locate(own) == own
    assert name_of(own) == "tiny-video"
