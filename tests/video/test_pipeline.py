"""VideoPipeline: called as a Diffusers pipeline, saved, loaded, on ranks, and by `weft generate`."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import weft
from tests.diffusers.toys import on_ranks, seeded
from tests.worlds import world
from weft.cli.main import main
from weft.core.errors import InputError
from weft.generate import pretrained
from weft.run.spawn.pool import Pool
from weft.video import saved_model
from weft.video.captions import LENGTH, WORDS
from weft.video.pipeline import VideoPipeline
from weft.video.saved_model import CONFIG as CONFIG_FILE
from weft.video.saved_model import WEIGHTS
from weft.video.transformer import DiTConfig, VideoDiT

PROMPT = "a red circle moving left"
CONFIG = DiTConfig(
    words=len(WORDS), length=LENGTH, video=(4, 6, 10), patch=(2, 2, 2), width=36, depth=2, heads=3
)


@cache
def pipeline() -> VideoPipeline:
    """Made once in each process, with weights that let the words say something."""
    model: Any = seeded(VideoDiT(CONFIG), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return VideoPipeline(model.eval())


def call(pipe: VideoPipeline, number: int = 1, **options: Any) -> Any:
    given = {"num_inference_steps": 3, "output_type": "latent", **options}
    return pipe(PROMPT, generator=torch.Generator().manual_seed(number), **given).frames


def on_rank(cfg: str) -> Tensor:
    """A rank of a real world; seeds differ, and the first one's counts."""
    pipe = weft.parallelize(pipeline(), cfg=cfg, check="first")
    try:
        return call(pipe, 1 + dist.get_rank())
    finally:
        weft.restore(pipe)


@pytest.mark.parametrize(("ranks", "cfg"), [(2, "auto"), (2, "off"), (3, "auto")])
def test_real_ranks_make_the_video_of_one_process(worlds: Callable[[int], Pool], ranks, cfg) -> None:
    made, wanted = worlds(ranks).run(on_rank, cfg), call(pipeline())
    assert all(torch.equal(found, made[0]) for found in made)
    torch.testing.assert_close(made[0], wanted, atol=2e-5, rtol=0)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_threads_as_ranks_make_the_video_of_one_process(ranks) -> None:
    def job(own: Any) -> Tensor:
        model: Any = VideoDiT(CONFIG)
        model.load_state_dict(pipeline().transformer.state_dict())
        return call(weft.parallelize(VideoPipeline(model.eval()), mesh=own))

    for found in on_ranks(ranks, job):
        torch.testing.assert_close(found, call(pipeline()), atol=2e-5, rtol=0)


def test_words_and_seeds_make_a_difference() -> None:
    pipe, made = pipeline(), call(pipeline())
    assert torch.equal(call(pipe), made)
    assert not torch.equal(call(pipe, 2), made)
    assert (call(pipe, negative_prompt="a blue square") - made).abs().max() > 1e-3
    other = pipe("a blue square", generator=torch.Generator().manual_seed(1), num_inference_steps=3)
    assert np.abs(other.frames - call(pipe, output_type="np")).max() > 1e-3


def test_frames_come_as_they_are_asked_for() -> None:
    made, frames, images = (call(pipeline(), output_type=kind) for kind in ("latent", "np", "pil"))
    assert made.shape == (1, 4, 3, 6, 10) and frames.shape == (1, 4, 6, 10, 3)
    np.testing.assert_allclose(frames, (made.permute(0, 1, 3, 4, 2) + 1) / 2, atol=1e-6)
    assert np.abs(np.asarray(images[0][3]) / 255 - frames[0, 3]).max() < 0.002 + 0.5 / 255
    (same,) = pipeline()([PROMPT, PROMPT], num_frames=2, height=4, width=8, return_dict=False)
    assert same.shape == (2, 2, 4, 8, 3)


def test_each_step_is_told_of_and_can_be_changed() -> None:
    seen = list[tuple[int, float]]()

    def on_step(pipe: Any, index: int, timestep: Tensor, given: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append((index, float(timestep)))
        assert pipe.num_timesteps == 4
        return {"latents": given["latents"] * 0} if index == 3 else {}

    assert not call(pipeline(), num_inference_steps=4, callback_on_step_end=on_step).any()
    assert seen == [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.25)]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"output_type": "gif"}, "output_type must be one of np, pil, latent, got 'gif'"),
        ({"width": 7}, "4×6×7 pixels cannot be cut"),
        ({"num_inference_steps": 0}, "steps must be >= 1"),
    ],
)
def test_what_it_cannot_make_is_refused(wrong, says) -> None:
    with pytest.raises(InputError, match=says):
        call(pipeline(), **wrong)


# On disk.


def test_a_directory_holds_all_of_it(tmp_path) -> None:
    pipeline().save(tmp_path / "a", dtype=torch.float32)
    again = VideoPipeline.load(tmp_path / "a")
    assert again.transformer.config == CONFIG and not again.transformer.training
    assert torch.equal(call(again), call(pipeline()))
    again.save(tmp_path / "b")
    half, whole = ((tmp_path / name / WEIGHTS).stat() for name in "ba")
    assert half.st_size < 0.6 * whole.st_size
    assert half.st_mode == (tmp_path / "b" / CONFIG_FILE).stat().st_mode, "others may read both"
    loaded = VideoPipeline.load(tmp_path / "b")
    assert next(loaded.transformer.parameters()).dtype == torch.float32
    torch.testing.assert_close(call(loaded), call(pipeline()), atol=0.02, rtol=0)


def test_a_full_disk_is_told_and_leaves_the_file_before(tmp_path) -> None:
    pipeline().save(tmp_path)
    before = (tmp_path / WEIGHTS).read_bytes()
    kept, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), limits[1]))
        with pytest.raises(OSError, match="File too large"):
            pipeline().save(tmp_path, dtype=torch.float32)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, kept)
    assert (tmp_path / WEIGHTS).read_bytes() == before and len([*tmp_path.iterdir()]) == 2


@pytest.mark.parametrize("left", [0, 5, 60, -1])
def test_a_file_that_was_cut_off_is_refused(tmp_path, left) -> None:
    pipeline().save(tmp_path)
    path = tmp_path / WEIGHTS
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(InputError, match=r"model.safetensors is damaged or incomplete"):
        VideoPipeline.load(tmp_path)


def test_a_model_of_other_words_is_refused(tmp_path) -> None:
    pipeline().save(tmp_path)
    path = tmp_path / CONFIG_FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "length": LENGTH + 1}))
    with pytest.raises(InputError, match=f"{LENGTH + 1} in a prompt; this weft has"):
        VideoPipeline.load(tmp_path)


# By command.


def ended(*words: Any) -> object:
    with pytest.raises(SystemExit) as end:
        main([str(word) for word in words])
    return end.value.code


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands borrow the session's ranks."""
    monkeypatch.setattr("weft.cli.ranks.model_ranks", lambda size: nullcontext(world(size)))


@pytest.mark.parametrize("name", ["ball.mp4", "ball.gif", "ball.png"])
@pytest.mark.usefixtures("ranks")
def test_weft_generate_without_a_directory_is_by_wefts_own(tmp_path, capfd, monkeypatch, name) -> None:
    pytest.importorskip("av")
    pipeline().save(tmp_path / "shipped", dtype=torch.float32)
    monkeypatch.setattr(saved_model, "SHIPPED", tmp_path / "shipped")
    out = tmp_path / name
    assert ended("generate", PROMPT, "-o", out, "--steps", "3", "--seed", "1", "--json") == 0
    told = json.loads(capfd.readouterr().out)
    assert (told["frames"], told["size"], told["steps"], told["ranks"]) == (4, "10x6", 3, 2)
    assert told["checked"]["attentions"] == CONFIG.depth and out.stat().st_size


@pytest.mark.usefixtures("ranks")
def test_weft_verify_takes_a_directory_of_wefts_own(tmp_path, capfd) -> None:
    pipeline().save(tmp_path)
    assert ended("verify", tmp_path, "--ranks", "2", "--json") == 0
    (row,) = json.loads(capfd.readouterr().out)["rows"]
    assert row["model"] == "VideoDiT" and row["sent"] > 0 and row["holds"]


def test_weft_generate_says_what_is_missing(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(saved_model, "SHIPPED", tmp_path / "shipped")
    for words, says in (((PROMPT,), "has no model"), ((tmp_path,), "There is no prompt")):
        assert ended("generate", *words, "-o", tmp_path / "ball.mp4") == 2
        assert says in " ".join(capsys.readouterr().err.split())


def test_a_pipeline_needs_no_diffusers(tmp_path, monkeypatch) -> None:
    from weft.generate.request import Request, arguments

    monkeypatch.setitem(sys.modules, "diffusers", None)  # importing it raises
    pipeline().save(tmp_path)
    pretrained.check(tmp_path)
    wanted = Request(model=tmp_path, prompt=PROMPT, out=Path("ball.mp4"), seed=1, frames=2, guidance=3.0)
    given, _ = arguments(wanted)
    pipe = pretrained.load_pipeline(tmp_path, dtype=torch.float32)
    assert pipe(**given, num_inference_steps=2).frames.shape == (1, 2, 6, 10, 3)
