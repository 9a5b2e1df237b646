"""Optimise: AdamW and Muon, a rate that rises and falls as a cosine, and an average of the weights."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from weft.train.muon import Muon
from weft.train.recipe import TrainPart


def optimisers(model: nn.Module, part: TrainPart) -> list[torch.optim.Optimizer]:
    """Each for some of the weights. Muon has the matrices inside blocks; those at the ends, as vectors have,
    learn better by AdamW.
    """
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    inner = [name for name in trained if name.startswith("blocks.") and name.endswith(".weight")]
    matrices = [trained.pop(name) for name in inner if trained[name].dim() == 2 and part.optimiser == "muon"]
    muon = [Muon(matrices, part.rate, decay=part.decay)] if matrices else []
    return [adamw(trained.values(), part), *muon]


def adamw(weights: Iterable[nn.Parameter], part: TrainPart) -> torch.optim.AdamW:
    """Matrices decay; biases, norms and tables do not."""
    trained = list(weights)
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
