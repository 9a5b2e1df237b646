"""Upscaler: frames at a multiple of the size in which a model makes them.

Attention is on few large patches, and has no time for the edges in them; those are of a kind, and a few
thousand weights learn to draw them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 24


class Upscaler(nn.Module):
    """Begins as interpolation, and learns what to add to it."""

    def __init__(self, times: int, channels: int) -> None:
        super().__init__()
        self.times = times
        self.layers = nn.Sequential(
            nn.Conv2d(channels, WIDTH, 3, padding=1, padding_mode="replicate"),
            nn.GELU(),
            nn.Conv2d(WIDTH, WIDTH, 3, padding=1, padding_mode="replicate"),
            nn.GELU(),
            nn.Conv2d(WIDTH, channels * times**2, 3, padding=1, padding_mode="replicate"),
        )
        last: nn.Conv2d = self.layers[-1]  # pyright: ignore[reportAssignmentType]
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)  # pyright: ignore[reportArgumentType]

    def forward(self, frames: Tensor) -> Tensor:
        """[N, C, H, W] at `times` the height and width."""
        plain = F.interpolate(frames, scale_factor=self.times, mode="bilinear")
        return plain + F.pixel_shuffle(self.layers(frames), self.times)

    def videos(self, videos: Tensor) -> Tensor:
        """[B, T, C, H, W], one by one: the bits of a video do not depend on those beside it."""
        return torch.stack([self(video) for video in videos])


def shrunk(videos: Tensor, times: int) -> Tensor:
    """[B, T, C, H, W] as the model is to make it: the means of squares."""
    if times == 1:
        return videos
    return F.avg_pool2d(videos.flatten(0, 1), times).unflatten(0, videos.shape[:2])
