"""Previews: a picture of every kind of latents that pipelines have, or none."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image

from tests.serve.ranks import FACTS
from weft.generate.resume import StepInfo
from weft.serve.jobs import GenerationParams
from weft.serve.preview import latents_png, video_png

ASKED = GenerationParams(
    kind="video", model="toy", prompt="a loom", seed=0, format="mp4", frames=8, height=32, width=48, steps=4
)
PATCHES = replace(FACTS, patch=(2, 8, 8))
"""A grid of 4 × 4 × 6."""


def moment(latents: torch.Tensor, prediction: torch.Tensor | None = None) -> StepInfo:
    return StepInfo(
        1, 0.1, latents, latents if prediction is None else prediction, lambda: pytest.fail("not saved")
    )


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(BytesIO(png)).convert("RGB"))


def test_the_own_model_shows_the_middle_frame_of_the_branch_with_the_prompt() -> None:
    prediction = torch.zeros(4, 5, 3, 6, 6)  # two jobs, each without and with its prompt
    prediction[3, 2] = 1.0
    assert (pixels(video_png(moment(prediction), 1, 2)) == 255).all()
    assert (pixels(video_png(moment(prediction), 0, 2)) == 128).all()


LATENTS = {
    "channels, frames": (16, 4, 4, 6),
    "frames, channels": (4, 16, 4, 6),
    "an image": (16, 4, 6),
    "packed": (4 * 4 * 6, 16),
}


@pytest.mark.parametrize("shape", LATENTS.values(), ids=LATENTS)
def test_latents_are_shown_as_wide_as_they_are(shape: tuple[int, ...]) -> None:
    shown = pixels(latents_png(moment(torch.randn(2, *shape)), 1, ASKED, PATCHES))
    assert shown.shape[1] / shown.shape[0] == 6 / 4
    assert (shown.min(), shown.max()) == (0, 255)


def test_the_frame_is_that_in_the_middle() -> None:
    latents = torch.zeros(1, 16, 4, 4, 6)
    latents[0, :, 2, :2] = 1.0
    shown = pixels(latents_png(moment(latents), 0, ASKED, PATCHES))
    assert shown[0, 0].tolist() == [255, 255, 255]
    assert shown[-1, 0].tolist() == [0, 0, 0]


@pytest.mark.parametrize("shape", [(2, 4, 6), (95, 16), (16,)], ids=["two channels", "odd rows", "a vector"])
def test_odd_latents_are_not_shown(shape: tuple[int, ...]) -> None:
    assert latents_png(moment(torch.randn(1, *shape)), 0, ASKED, PATCHES) == b""
