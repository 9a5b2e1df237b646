"""`weft models`: what it lists is what the adapters say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from weft.cli import models
from weft.cli.main import main
from weft.diffusers import adapters
from weft.diffusers.adapters import ADAPTERS
from weft.diffusers.refused import REFUSED


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["models", *words])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_every_adapter_has_a_line_that_fits_a_terminal(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = [" ".join(line.split()) for line in said(capsys).splitlines()]
    for name in ADAPTERS:
        assert any(line.startswith(f"{name} ") for line in lines)
    for row in ("CogVideoXTransformer3DModel joint yes", "LatteTransformer3DModel switching – yes"):
        assert any(line.startswith(row) for line in lines)
    assert any(line.startswith("WanTransformer3DModel self + cross yes yes yes") for line in lines)


def test_what_is_not_split_has_a_reason(capsys) -> None:
    text = " ".join(said(capsys).split())
    assert "TransformerTemporalModel: is a part of a UNet" in text
    assert all(f"{name}: {reason}" in text for name, reason in REFUSED.items())


def test_json_has_the_same(capsys) -> None:
    rows = json.loads(said(capsys, "--json"))
    assert {row["model"]: row["attention"] for row in rows} == {n: a.kind for n, a in ADAPTERS.items()}
    assert {row["model"] for row in rows if not row["masks"]} == {
        n for n, a in ADAPTERS.items() if a.grid is None
    }


def test_the_vaes_of_every_model_are_found_in_diffusers(capsys, monkeypatch) -> None:
    pytest.importorskip("diffusers")
    found = models._decoders()
    assert len(set(ADAPTERS) & set(found)) >= 45  # some make pixels or sound, some have modular pipelines
    assert found["WanTransformer3DModel"] == {"AutoencoderKLWan"}
    assert found["FluxTransformer2DModel"] == {"AutoencoderKL"}
    whole = {row["model"] for row in json.loads(said(capsys, "--json")) if row["vae"] is False}
    assert whole == {"AceStepTransformer1DModel", "CosmosTransformer3DModel", "EasyAnimateTransformer3DModel"}
    monkeypatch.setattr("weft.diffusers.vae.TILED_VAES", {"AutoencoderKLWan"})
    assert {row["model"]: row["vae"] for row in models._rows()}["FluxTransformer2DModel"] is False


def test_without_diffusers_nothing_is_said_of_vaes(monkeypatch) -> None:
    monkeypatch.setattr(models, "find_spec", lambda _: None)
    assert {row["vae"] for row in models._rows()} == {None}


def test_a_file_in_the_folder_is_an_adapter(tmp_path, monkeypatch) -> None:
    (tmp_path / "painter.py").write_text(
        "from weft.diffusers.adapter import Adapter\n"
        'ADAPTERS = (Adapter("Painter", attention={"blocks.*.attn": "video"}),)\n'
    )
    monkeypatch.setattr(adapters, "__path__", [*adapters.__path__, str(tmp_path)])
    assert adapters.load_adapters().keys() - ADAPTERS.keys() == {"Painter"}


def test_the_readme_counts_as_many() -> None:
    """Those of Diffusers: by name, and how many more."""
    text = " ".join((Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").split())
    found = re.search(r"the module\. ((?:\w+, )+\w+) and (\d+) more of Diffusers \(`weft models`\)", text)
    assert found is not None
    named = found[1].split(", ")
    assert all(any(each.startswith(name) for each in ADAPTERS) for name in named)
    assert len(named) + int(found[2]) == len(ADAPTERS) - 1, "one is weft's own"
