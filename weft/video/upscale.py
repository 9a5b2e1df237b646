"""Upscaler: a small convolutional network that enlarges the frames of a model, and its training.

The transformer's patches are few and large, too coarse for edges. Edges look alike everywhere, and a few
thousand weights learn to draw them.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.video.dataset import ClipSource, downscaled, to_tensor
from weft.video.flow import generator

WIDTH = 24
STEPS, CLIPS, FRAMES = 600, 8, 4
LR = 3e-3
MAX_NOISE = 0.1
"""Added to the input in training: a model's frames are not as clean as averaged pixels."""


class Upscaler(nn.Module):
    """Interpolation plus a learned residual, which starts at zero."""

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
        for weight in self.layers[-1].parameters():
            nn.init.zeros_(weight)

    def forward(self, frames: Tensor) -> Tensor:
        """Enlarge [N, C, H, W] by `times`."""
        interpolated = F.interpolate(frames, scale_factor=self.times, mode="bilinear")
        return interpolated + F.pixel_shuffle(self.layers(frames), self.times)

    def videos(self, videos: Tensor) -> Tensor:
        """Enlarge [B, T, C, H, W] one by one, so that a video's bits do not depend on its batch."""
        return torch.stack([self(video) for video in videos])


def fit_upscaler(
    upscaler: Upscaler, source: ClipSource, *, clips: int | None, seed: int, steps: int | None = None
) -> float:
    """Train for minutes of one core on the first `clips` of a source (None: endless); the last MSE."""
    steps = STEPS if steps is None else steps
    optimizer = torch.optim.AdamW(upscaler.parameters(), LR, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    mse = 0.0
    for step in range(steps):
        rng = generator(seed, step)
        indices = torch.randint(clips or 1 << 20, (CLIPS,), generator=rng).tolist()
        video = to_tensor(source.batch(indices)[0])
        frames = video[:, torch.randint(video.shape[1], (FRAMES,), generator=rng)]
        small = downscaled(frames, upscaler.times)
        noise = torch.rand(len(small), 1, 1, 1, 1, generator=rng) * MAX_NOISE
        small = small + noise * torch.randn(small.shape, generator=rng)
        loss = F.mse_loss(upscaler(small.flatten(0, 1)), frames.flatten(0, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        mse = loss.item()
    return mse
