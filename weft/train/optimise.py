"""Optimise: AdamW, a rate that rises and falls as a cosine, and an average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from weft.train.recipe import TrainPart


def adamw(model: nn.Module, part: TrainPart) -> torch.optim.AdamW:
    """Matrices decay; biases, norms and tables do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = (
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": part.decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    )
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=part.rate, betas=(0.9, 0.95), fused=True
    )


def rate(part: TrainPart, step: int) -> float:
    """Of step 1, 2, …: up to `part.rate` in a straight line, and down again as a cosine."""
    if step <= part.warmup:
        return part.rate * step / part.warmup
    done = (step - part.warmup) / max(1, part.steps - part.warmup)
    low = part.floor * part.rate
    return low + (part.rate - low) * (1 + math.cos(math.pi * min(1.0, done))) / 2


@torch.no_grad()
def follow(averages: Iterable[Tensor], weights: Iterable[Tensor], share: float, step: int) -> None:
    """Averages keep `share` of themselves, less in the first steps, when weights are not worth keeping."""
    share = min(share, (1 + step) / (10 + step))
    for average, weight in zip(averages, weights, strict=True):
        average.lerp_(weight.detach(), 1 - share)
