"""`weft generate` and `weft verify MODEL_DIR`: tiny checkpoints on shared ranks, against one process."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.worlds import world
from weft.cli.main import main
from weft.core.errors import InputError
from weft.core.units import clock
from weft.generate import media
from weft.generate.generate import division
from weft.generate.progress import StepStats, line
from weft.generate.request import Request, arguments

pytest.importorskip("transformers")
pytest.importorskip("av")

LTX = ("--size", "96x64", "--frames", "9", "--steps", "3", "--set", "max_sequence_length=17")
FLUX = ("--size", "48x80", "--steps", "3", "--set", "max_sequence_length=17")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tiny checkpoints, written once."""
    from tests.diffusers import checkpoints

    folder = tmp_path_factory.mktemp("models")
    for name in ("ltx", "flux"):
        checkpoints.TINY[name](folder / name)
    (folder / "klein").mkdir()
    (folder / "klein" / "model_index.json").write_text('{"_class_name": "Flux2KleinKVPipeline"}')
    return folder


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands borrow the session's ranks."""
    monkeypatch.setattr("weft.cli.ranks.model_ranks", lambda size: nullcontext(world(size)))


def ended(*words: str) -> object:
    """The exit code."""
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return end.value.code


def request(model: Path, **options: Any) -> Request:
    return Request(model=model, prompt="a loom", out=Path("loom.mp4"), seed=1, **options)


# What is refused before anything runs.


def test_an_empty_prompt_is_refused(capsys) -> None:
    assert ended("generate", "", "-o", "loom.mp4") == 2
    assert "The prompt is empty." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("-o", "out.webp"), "out.webp must end in one of .mp4, .gif, .png"),
        (("-o", "no/such/out.mp4"), "There is no folder no/such for out.mp4"),
        (("-o", "{tmp}/folder.mp4"), "is a folder"),
        (("-o", "{tmp}/out.mp4"), "is not a Diffusers checkpoint directory: it has no model_index.json"),
    ],
)
def test_a_target_or_a_model_that_is_not_there_is_refused_at_once(words, says, tmp_path, capsys) -> None:
    (tmp_path / "folder.mp4").mkdir()
    assert ended("generate", tmp_path, "a loom", *(word.format(tmp=tmp_path) for word in words)) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ranks", "0"), "--ranks must be >= 1"),
        (("--size", "96"), "'96' is not width x height"),
        (("--seed", "-1"), "--seed must be in [0, 2⁶³ - 1], got -1"),
        (("--set", "steps"), "--set steps is not NAME=VALUE"),
        (("--image", "none.png"), "--image none.png is not a file"),
        (("--dtype", "int8"), "dtype 'int8' is not supported"),
        (("--backend", "fa5"), "backend='fa5' is unknown. Use one of auto, exact, flash"),
    ],
)
def test_mistyped_options_are_refused_at_once(words, says, models, tmp_path, capsys) -> None:
    assert ended("generate", models / "ltx", "a loom", "-o", tmp_path / "out.mp4", *words) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_models_load_in_bfloat16_on_gpus_unless_told_otherwise(models, tmp_path, monkeypatch) -> None:
    asked: list[Request] = []
    monkeypatch.setattr("weft.cli.generate._generate", lambda request, _: asked.append(request))
    line = ("generate", models / "ltx", "a loom", "-o", tmp_path / "out.mp4")
    for has_gpus in (False, True):
        monkeypatch.setattr("torch.cuda.is_available", lambda has_gpus=has_gpus: has_gpus)
        for words in ((), ("--dtype", "float16", "--backend", "flash")):
            assert ended(*line, *words) == 0
    told = [(one.dtype, one.backend) for one in asked]
    assert told == [("float32", "auto"), ("float16", "flash"), ("bfloat16", "auto"), ("float16", "flash")]


@pytest.mark.parametrize(
    ("model", "options", "says"),
    [
        ("flux", {"frames": 5}, "FluxPipeline takes no --frames. It takes prompt_2"),
        ("flux", {}, "FluxPipeline cannot make loom.mp4. It makes images"),
        ("ltx", {"more": {"strength": 1}}, "LTXPipeline takes no strength"),
        ("ltx", {"image": Path("x.png")}, "LTXPipeline takes no --image"),
        ("flux", {"negative": "rust"}, "no negative prompt with true_cfg_scale=1.0"),
        ("klein", {"guidance": 2.0}, "Flux2KleinKVPipeline takes no --guidance. It takes image"),
    ],
)
def test_options_that_a_pipeline_has_not_are_refused_before_it_is_loaded(
    model, options, says, models
) -> None:
    with pytest.raises(InputError, match=says.replace("(", r"\(")):
        arguments(request(models / model, **options))


def test_options_have_the_names_of_the_pipeline(models) -> None:
    wanted = {"width": 96, "height": 64, "frames": 9, "steps": 3, "negative": "rust", "guidance": 2.0}
    given, fps = arguments(request(models / "ltx", **wanted))
    assert fps == 25  # the pipeline's own
    expected = {"width": 96, "height": 64, "num_frames": 9, "num_inference_steps": 3, "guidance_scale": 2.0}
    assert given.items() >= (expected | {"prompt": "a loom", "negative_prompt": "rust"}).items()
    assert arguments(request(models / "ltx", fps=8.0))[0]["frame_rate"] == 8.0


def test_guidance_that_is_not_distilled_is_that_of_two_branches(models, tmp_path) -> None:
    flux = replace(request(models / "flux", guidance=3.0), out=Path("loom.png"))
    assert arguments(flux)[0]["guidance_scale"] == 3.0  # this one is distilled
    plain = tmp_path / "flux"
    (plain / "transformer").mkdir(parents=True)
    (plain / "model_index.json").write_text((models / "flux" / "model_index.json").read_text())
    (plain / "transformer" / "config.json").write_text('{"guidance_embeds": false}')
    assert arguments(replace(flux, model=plain))[0]["true_cfg_scale"] == 3.0


# The parts.


def test_the_live_line_has_pace_and_time_left() -> None:
    slow, fast = (StepStats(seconds=s, imbalance=1.25, exposed=0.041) for s in (9.0, 2.0))
    pace = "step 3/50 · 2.00 s/step · 1:34 left"
    assert line([slow, fast, fast], 50) == f"{pace} · imbalance 1.25 · exposed 4.1%"
    assert line([slow], 50) == "step 1/50 · 9.00 s/step · imbalance 1.25 · exposed 4.1%", "it made the plans"
    assert len(line([replace(slow, seconds=999.99, imbalance=99.9, exposed=1.0)] * 2, 1000)) < 80
    assert line([replace(fast, imbalance=None)], 1).startswith("step 1/1 · 2.00 s/step · 0:00 left · exposed")
    assert clock(3729.4) == "1:02:09"


def test_one_line_says_what_the_ranks_do() -> None:
    assert division({("ring", 2): None}, 2) == "2 ranks: each attention sharded over all of them by ring"
    assert (
        division([("alone", 1)], 2) == "2 ranks: guidance in two halves, one with the prompt and one without"
    )
    assert division([("ulysses", 4), ("ring", 2)], 4) == (
        "4 ranks: each attention sharded over all of them by ulysses; guidance in two halves, "
        "2 with the prompt and 2 without, each sharded by ring"
    )
    assert division([("alone", 1)], 1) == division([], 2) == ""


def test_a_file_is_written_whole_or_not_at_all(tmp_path) -> None:
    out = tmp_path / "out.mp4"
    out.write_text("before")
    with pytest.raises(ValueError):  # the encoder's: these are four colours
        media.write(out, np.zeros((2, 8, 8, 4)), {"versions": {"weft": "1"}}, fps=8)
    assert out.read_text() == "before"
    assert list(tmp_path.iterdir()) == [out]


# On two ranks: each that begins costs seconds, for Diffusers and transformers are imported there.


def one_process(model: Path, **given: Any) -> np.ndarray:
    import torch
    from diffusers import DiffusionPipeline

    pipe = DiffusionPipeline.from_pretrained(model)
    pipe.set_progress_bar_config(disable=True)
    random = torch.Generator().manual_seed(5)
    sizes = {"num_inference_steps": 3, "max_sequence_length": 17}
    made = pipe("a löom", **sizes, **given, generator=random, output_type="np")
    return np.asarray(made[0])[0]


@pytest.mark.usefixtures("ranks")
def test_an_image_is_that_of_one_process_and_says_how_it_was_made(models, tmp_path, capfd) -> None:
    from PIL import Image

    out = tmp_path / "loom.png"
    assert ended("generate", models / "flux", "a löom", "-o", out, "--seed", "5", *FLUX) == 0
    shown = capfd.readouterr().out
    assert f"{out}: 48x80, seed 5" in shown
    assert "3 steps of" in shown
    image = Image.open(out)
    expected = one_process(models / "flux", width=48, height=80) * 255
    assert np.abs(np.asarray(image, dtype=float) - expected).max() <= 1.0
    assert np.asarray(image).std() > 5  # there is something to see
    assert image.text["Title"] == "a löom"
    about = json.loads(image.text["Comment"])
    assert (about["prompt"], about["seed"], about["ranks"], about["model"]) == ("a löom", 5, 2, "flux")
    assert about["plan"] == "auto"
    assert about["plans"]
    assert {"weft", "torch", "diffusers", "transformers"} == set(about["versions"])
    assert about["more"] == {"max_sequence_length": 17}
    assert (about["width"], about["height"], about["steps"]) == (48, 80, 3)


@pytest.mark.usefixtures("ranks")
def test_a_video_has_a_seed_of_its_own_and_its_numbers_as_json(models, tmp_path, capfd) -> None:
    import av

    out = tmp_path / "loom.mp4"
    words = ("--json", "--cfg", "off", "--fps", "12", "--plan", "ring", *LTX)
    assert ended("generate", models / "ltx", "a loom", "-o", out, *words) == 0
    made = json.loads(capfd.readouterr().out)
    assert (made["frames"], made["size"], made["fps"], made["steps"]) == (9, "96x64", 12.0, 3)
    assert 0 <= made["seed"] < 2**31
    assert made["imbalance"] >= 1.0
    assert 0.0 < made["exposed"] <= 1.0
    assert made["plans"] == ["ring"]
    assert made["checked"]["attentions"] == 2
    assert made["checked"]["error"] <= made["checked"]["allowed"]
    with av.open(str(out)) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height, stream.average_rate) == (4 * 96, 4 * 64, 12)
        assert sum(1 for _ in container.decode(video=0)) == 9
        about = json.loads(container.metadata["comment"])
    assert about["seed"] == made["seed"]
    assert about["plans"] == ["ring"]
    asked = {"width": 96, "height": 64, "frames": 9, "steps": 3, "fps": 12.0, "cfg": "off"}
    assert {
        name: about[name] for name in asked
    } == asked  # enough to make it again; the file itself is enlarged
    assert "tiling" not in about
    assert [path.name for path in tmp_path.iterdir()] == ["loom.mp4"]


@pytest.mark.usefixtures("ranks")
def test_what_the_pipeline_itself_refuses_is_one_sentence(models, tmp_path, capfd) -> None:
    words = ("--size", "95x64", "--frames", "9", "--steps", "1")
    assert ended("generate", models / "ltx", "a loom", "-o", tmp_path / "out.mp4", *words) == 2
    said = capfd.readouterr().err
    assert said.startswith("weft: LTXPipeline refused its arguments: `height` and `width`")
    assert said.count("divisible") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("ranks")
def test_the_transformer_of_a_checkpoint_is_verified(models, capfd, monkeypatch) -> None:
    assert ended("verify", models / "flux", "--ranks", "2", "--json") == 0
    found = json.loads(capfd.readouterr().out)
    assert found["holds"]
    (row,) = found["rows"]
    assert (row["ranks"], row["part"], row["model"]) == (2, "transformer", "FluxTransformer2DModel")
    assert row["error"] <= row["tolerance"] == 2e-5
    assert row["sent"] > 0
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr("weft.generate.rank_parity.TOLERANCE", {"float32": -1.0})
    assert ended("verify", models / "flux", "--ranks", "2", "--plan", "gather") == 4
    out, err = capfd.readouterr()
    assert "DIFFERS" in out
    assert "gather" in out
    assert err.endswith("weft: 1 of 1 checks exceed their tolerance.\n")


@pytest.mark.usefixtures("ranks")
def test_a_checkpoint_in_16_bits_is_about_what_it_is_on_one_rank(models, capfd) -> None:
    assert ended("verify", models / "flux", "--ranks", "2", "--dtype", "bfloat16", "--json") == 0
    (row,) = json.loads(capfd.readouterr().out)["rows"]
    assert (row["dtype"], row["device"]) == ("bfloat16", "cpu")
    assert row["alone_error"] > 1e-4  # it was computed in 16 bits, and in float32
    assert 0 < row["error"] <= row["tolerance"] == min(2**-4, 2 * row["alone_error"] + 2**-8)
