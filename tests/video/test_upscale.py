"""Upscaler: interpolation to begin with, each video for itself; and a pipeline that has one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tests.diffusers.toys import seeded
from weft.core.errors import InputError
from weft.video.captions import LENGTH, WORDS
from weft.video.pipeline import VideoPipeline
from weft.video.transformer import DiTConfig, VideoDiT
from weft.video.upscale import Upscaler, downscaled

SIZES = {"video": (2, 12, 20), "patch": (1, 4, 4), "width": 24, "depth": 1, "heads": 2, "upscale": 2}


def pipeline() -> VideoPipeline:
    config = DiTConfig(words=len(WORDS), length=LENGTH, **SIZES)  # type: ignore[arg-type]
    upscaler = seeded(Upscaler(2, 3), dtype=torch.float32)
    return VideoPipeline(seeded(VideoDiT(config), dtype=torch.float32), upscaler=upscaler)


def test_it_begins_as_interpolation() -> None:
    frames = torch.randn(2, 3, 5, 7)
    assert torch.equal(Upscaler(3, 3)(frames), F.interpolate(frames, scale_factor=3, mode="bilinear"))


def test_shrunk_has_the_means_of_squares() -> None:
    video = torch.randn(2, 3, 1, 4, 6, dtype=torch.float64)
    small = downscaled(video, 2)
    assert small.shape == (2, 3, 1, 2, 3)
    assert torch.allclose(small[1, 2, 0, 1, 2], video[1, 2, 0, 2:, 4:].mean())
    assert downscaled(video, 1) is video


@torch.no_grad()
def test_the_bits_of_a_video_do_not_depend_on_those_beside_it() -> None:
    upscaler, videos = seeded(Upscaler(2, 3), dtype=torch.float32), torch.randn(3, 4, 3, 5, 6)
    assert torch.equal(upscaler.videos(videos)[1:2], upscaler.videos(videos[1:2]))


def test_a_pipeline_makes_what_is_small_and_shows_what_is_large() -> None:
    pipe = pipeline()

    def made(kind: str) -> torch.Tensor:
        frames = pipe(
            "a red circle",
            num_inference_steps=2,
            generator=torch.Generator().manual_seed(0),
            output_type=kind,
        ).frames
        return torch.as_tensor(frames)

    small = made("latent")
    assert small.shape == (1, 2, 3, 6, 10)
    assert pipe.upscaler is not None
    large = pipe.upscaler.videos(small).add(1).div(2).clamp(0, 1).permute(0, 1, 3, 4, 2)
    assert made("np").shape == (1, 2, 12, 20, 3)
    assert torch.allclose(made("np"), large, atol=1e-6)


def test_it_is_saved_with_its_model(tmp_path: Path) -> None:
    pipe = pipeline()
    pipe.save(tmp_path, dtype=torch.float32)
    again = VideoPipeline.load(tmp_path)
    assert again.transformer.config.upscale == 2
    assert pipe.upscaler is not None and again.upscaler is not None
    for name, weight in pipe.upscaler.state_dict().items():
        assert torch.equal(again.upscaler.state_dict()[name], weight)


@pytest.mark.parametrize("upscale", [0, 3])
def test_what_does_not_divide_a_patch_is_refused(upscale: int) -> None:
    with pytest.raises(InputError, match=f"upscale={upscale}"):
        DiTConfig(words=2, length=2, **{**SIZES, "upscale": upscale})  # type: ignore[arg-type]
