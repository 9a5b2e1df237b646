"""Previews: a PNG of what is under way, small and quickly made."""

from __future__ import annotations

from io import BytesIO
from math import prod
from typing import Any

import numpy as np
from torch import Tensor

from weft.models.media import VISIBLE, enlarged
from weft.models.resume import Moment
from weft.serve.jobs import Asked


def own(now: Moment, job: int, jobs: int) -> bytes:
    """weft's own model predicts the clean video in each step: its middle frame, sharper with every step."""
    video = now.answer[len(now.answer) - jobs + job]  # the branch with the prompt is the last
    frame = video[len(video) // 2].add(1).div(2).clamp(0, 1)
    return _png(frame.permute(1, 2, 0))


def crude(now: Moment, job: int, asked: Asked, facts: dict[str, Any]) -> bytes:
    """Three channels of latents, normalised: shapes in false colours; nothing if latents are odd."""
    grid = _grid(asked, facts)
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


def _grid(asked: Asked, facts: dict[str, Any]) -> tuple[int, int, int]:
    """Tokens in time, height and width."""
    t, h, w = facts["patch"]
    return -(-asked.frames // t), asked.height // h, asked.width // w


def _png(pixels: Tensor) -> bytes:
    from PIL import Image

    shown = np.round(np.nan_to_num(pixels.cpu().numpy()) * 255).astype(np.uint8)
    file = BytesIO()
    # A plain image of a few pixels: it is the page that waits for it, not the disk.
    Image.fromarray(enlarged(shown[None], VISIBLE // 2)[0]).save(file, format="PNG", compress_level=1)
    return file.getvalue()
