"""Model folders that somebody else wrote: an error in a sentence, in little memory, and never code."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from weft.core.errors import InputError
from weft.generate import pretrained
from weft.generate.pretrained import INDEX
from weft.generate.state import PipelineState
from weft.video.pipeline import VideoPipeline
from weft.video.saved_model import CONFIG, WEIGHTS, shipped

DEEP = "[" * 100_000
TEXTS = [
    "",
    "[]",
    "{",
    DEEP,
    '{"a":' * 100_000,
    "9" * 9999,
    '"a"',
    '{"_class_name": 1, "_class_name": 2}',
    "\0",
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(shipped(), tmp_path / "model"))


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_a_config_that_is_no_object_is_refused(text: str, folder: Path) -> None:
    (folder / CONFIG).write_text(text)
    for read in (pretrained.check, pretrained.pipeline_class, VideoPipeline.load):
        with pytest.raises(InputError, match=CONFIG):
            read(folder)


SIZES: list[dict[str, Any]] = [
    {"width": 6 * 10**9}, {"width": 10**30}, {"depth": 10**6}, {"depth": 10**30}, {"depth": -1}, {"depth": 0},
    {"words": 2**40}, {"words": True}, {"heads": 0}, {"heads": "6"}, {"mlp": 10**6}, {"mlp": 1.5},
    {"patch": [2, 8]}, {"patch": 3}, {"patch": [10**9, 8, 8]}, {"patch": None}, {"video": [[]]},
    {"shift": "a"},
    {"channels": 10**5}, {"channels": -3}, {"vocabulary": 3}, {"vocabulary": {"words": 3, "length": 8}},
    {"vocabulary": {"words": ["a", {}], "length": 8}}, {"vocabulary": {}}, {"qk_norm": 1}, {"upscale": 10**9},
]  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_sizes_that_are_not_those_of_the_weights_are_refused(sizes: dict[str, Any], folder: Path) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | sizes))
    with pytest.raises(InputError):
        VideoPipeline.load(folder)


@pytest.mark.parametrize("data", [b"", b"\xff" * 64, (10**12).to_bytes(8, "little") + b"{}", b"\x80\x04."])
def test_weights_that_are_no_safetensors_are_refused(data: bytes, folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(data)
    with pytest.raises(InputError, match=WEIGHTS):
        VideoPipeline.load(folder)
    (folder / WEIGHTS).unlink()
    with pytest.raises(InputError, match=WEIGHTS):
        VideoPipeline.load(folder)


def test_weights_that_are_a_pipe_do_not_block(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)
    with pytest.raises(InputError, match=WEIGHTS):
        VideoPipeline.load(folder)


def test_weights_of_other_names_are_told_in_a_sentence(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    save_file(
        {f"{'x' * 999}.{name}" if "mlp" in name else name: x for name, x in weights.items()}, folder / WEIGHTS
    )
    with pytest.raises(InputError, match="do not match its") as refused:
        VideoPipeline.load(folder)
    assert len(str(refused.value)) < 1000 and "\n" not in str(refused.value)


def test_weights_that_are_a_pickle_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers")
    part = tmp_path / "transformer"
    part.mkdir()
    (tmp_path / INDEX).write_text(WAN % '"transformer": ["diffusers", "WanTransformer3DModel"]')
    sizes = {"num_layers": 1, "num_attention_heads": 1, "attention_head_dim": 12, "ffn_dim": 8, "text_dim": 4}
    (part / CONFIG).write_text(json.dumps({"_class_name": "WanTransformer3DModel", **sizes}))
    torch.save({"x": torch.zeros(1)}, part / "diffusion_pytorch_model.bin")
    opened: list[Any] = []
    monkeypatch.setattr(torch, "load", lambda *args, **_: opened.append(args))
    for load in (pretrained.load_pipeline, lambda folder: pretrained.load_transformer(folder, "transformer")):
        with pytest.raises(InputError, match="safetensors"):
            load(tmp_path)
    assert not opened


WAN = '{"_class_name": "WanPipeline", %s}'
INDICES: list[Any] = [
    *TEXTS, "{}", '{"_class_name": ["a", "b"]}', WAN % '"../../transformer": ["a", "b"]',
    WAN % '"/etc/transformer": ["diffusers", "WanTransformer3DModel"]',
    WAN % '"transformer": []', WAN % '"transformer": [1, 2]',
]  # fmt: skip


@pytest.mark.parametrize("text", INDICES, ids=range(len(INDICES)))
def test_a_hostile_index_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(InputError):
        pretrained.transformers(tmp_path)


@pytest.mark.parametrize("name", ["utils", "__version__", "os", "NoSuchPipeline", "x" * 9999])
def test_a_class_that_is_no_pipeline_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    (tmp_path / INDEX).write_text(json.dumps({"_class_name": name}))
    with pytest.raises(InputError, match="does not have"):
        pretrained.pipeline_class(tmp_path)


@pytest.mark.parametrize(
    "text", ['{"_class_name": "WanPipeline"}', '{"_class_name": "WanPipeline", "vae": 3}']
)
def test_a_folder_that_diffusers_cannot_load_is_refused(text: str, tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(InputError, match="Diffusers cannot load"):
        pretrained.load_pipeline(tmp_path)


@pytest.mark.parametrize(
    "state", [DEEP, "[]", "3", '{"step": 1e999, "values": 1}', '{"step": 1, "values": {"list": 3}}']
)
def test_a_hostile_state_is_refused(state: str) -> None:
    from safetensors.torch import save

    data = save({"0": torch.zeros(1)}, {"format": "weft state 1", "state": state})
    with pytest.raises(InputError, match="not a state of a pipeline"):
        PipelineState.from_bytes(data)
