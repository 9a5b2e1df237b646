"""Previews: a small PNG of an unfinished result, quickly made."""

from __future__ import annotations

from io import BytesIO
from math import prod

import numpy as np
from torch import Tensor

from weft.generate.media import MIN_VISIBLE_SIDE, enlarged
from weft.generate.resume import StepInfo
from weft.serve.jobs import GenerationParams
from weft.serve.model_facts import ModelFacts


def video_png(now: StepInfo, job: int, jobs: int) -> bytes:
    """Return the middle frame of the clean video that weft's own model predicts in each step."""
    video = now.prediction[len(now.prediction) - jobs + job]  # the branch with the prompt is the last
    frame = video[len(video) // 2].add(1).div(2).clamp(0, 1)
    return _png(frame.permute(1, 2, 0))


def latents_png(now: StepInfo, job: int, params: GenerationParams, facts: ModelFacts) -> bytes:
    """Return three normalized channels of latents, as false colors; b"" if latents have another form."""
    grid = facts.grid(params.frames, params.height, params.width)
    latents = now.latents[job].float()
    if latents.dim() == 2 and len(latents) == prod(grid):  # packed: a row for each token
        latents = latents.reshape(*grid, -1).permute(3, 0, 1, 2)
    elif latents.dim() == 4 and latents.shape[0] == grid[0] != latents.shape[1]:
        latents = latents.transpose(0, 1)
    if latents.dim() == 4:
        latents = latents[:, latents.shape[1] // 2]
    if latents.dim() != 3 or len(latents) < 3:
        return b""
    shown = latents[:3]
    low, high = shown.amin((1, 2), keepdim=True), shown.amax((1, 2), keepdim=True)
    return _png(((shown - low) / (high - low).clamp(min=1e-6)).permute(1, 2, 0))


def _png(pixels: Tensor) -> bytes:
    from PIL import Image

    shown = np.round(np.nan_to_num(pixels.cpu().numpy()) * 255).astype(np.uint8)
    file = BytesIO()
    # A plain image of a few pixels: speed counts more than size.
    Image.fromarray(enlarged(shown[None], MIN_VISIBLE_SIDE // 2)[0]).save(
        file, format="PNG", compress_level=1
    )
    return file.getvalue()
