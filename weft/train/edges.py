"""Edges: what an upscaler has to learn, from the clips that its model was trained on."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from weft.models.upscale import Upscaler, shrunk
from weft.train.data import Source, generator, to_tensor

STEPS, CLIPS, FRAMES = 600, 8, 4
RATE = 3e-3
NOISE = 0.1
"""At most, in what is to be enlarged: a model's frames are not as clean as means of pixels."""


def learn(
    upscaler: Upscaler, source: Source, *, clips: int | None, seed: int, steps: int | None = None
) -> float:
    """Minutes of one core, on the first `clips` of a source (None: no end); the last squared error."""
    steps = STEPS if steps is None else steps
    optimiser = torch.optim.AdamW(upscaler.parameters(), RATE, weight_decay=0.0)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    error = 0.0
    for step in range(steps):
        chance = generator(seed, step)
        indices = torch.randint(clips or 1 << 20, (CLIPS,), generator=chance).tolist()
        video = to_tensor(source.batch(indices)[0])
        some = torch.randint(video.shape[1], (FRAMES,), generator=chance)
        frames = video[:, some]
        small = shrunk(frames, upscaler.times)
        noise = torch.rand(len(small), 1, 1, 1, 1, generator=chance) * NOISE
        small = small + noise * torch.randn(small.shape, generator=chance)
        loss = F.mse_loss(upscaler(small.flatten(0, 1)), frames.flatten(0, 1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        slower.step()
        error = loss.item()
    return error
