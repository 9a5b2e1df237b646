"""Evaluation: numbers that compare video models, on the same clips, timesteps and noise.

a, b = (held_out_loss(model, source, clips=64)[None] for model in (dense, sparse))
print(paired_difference(a, b))            # +0.31% (-0.10% to +0.72%)
print(ssim(generate_clips(pipe_a, prompts), generate_clips(pipe_b, prompts)))       # see weft.video.metrics
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.video import flow
from weft.video.dataset import HELD_OUT, ClipSource, to_tensor, vocabulary_of

if TYPE_CHECKING:
    from weft.video.pipeline import VideoPipeline

TIMESTEPS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.95)
BOOTSTRAP_DRAWS = 4000


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    source: ClipSource,
    *,
    clips: int = 64,
    timesteps: Sequence[float] = TIMESTEPS,
    seed: int = 0,
    downscale: int = 1,
) -> np.ndarray:
    """Return the flow loss [clips, timesteps] of held-out clips, at fixed timesteps and noise.

    Of a finite set these are the last clips. The noise of a clip does not depend on the number of clips.
    """
    if source.num_clips is not None and not 0 < clips <= source.num_clips:
        raise InputError(f"clips must be in [1, {source.num_clips}], the size of the set, got {clips}.")
    first = HELD_OUT if source.num_clips is None else source.num_clips - clips
    encode = vocabulary_of(source).encode
    losses: list[Tensor] = []
    with eval_mode(model):
        weight = next(model.parameters())
        t = torch.tensor(timesteps).to(weight)
        for index in range(first, first + clips):
            pixels, [caption] = source.batch([index])
            video = to_tensor(pixels, downscale).to(weight)
            noise = flow.randn((len(t), *video.shape[1:]), flow.generator(seed, index), weight)
            words = torch.tensor([encode(caption)], device=weight.device).expand(len(t), -1)
            losses.append(flow.weighted_loss(model, flow.NoisedBatch.of(video, noise, t, words), video))
    return torch.stack(losses).double().cpu().numpy()


def generate_clips(
    pipe: VideoPipeline, prompts: Sequence[str], *, seed: int = 0, batch: int = 8, **kwargs: Any
) -> np.ndarray:
    """Return clips [prompts, T, H, W, 3] from 0 to 1; noise depends on the seed, the index and the batch."""
    clips: list[np.ndarray] = []
    with eval_mode(pipe.transformer):
        for start in range(0, len(prompts), batch):
            texts = list(prompts[start : start + batch])
            clips.extend(pipe(texts, generator=flow.generator(seed, start), **kwargs).frames)
    return np.stack(clips)


@dataclass(frozen=True)
class RelativeDifference:
    """(b - a) / a, and its 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.2%} ({self.low:+.2%} to {self.high:+.2%})"


def paired_difference(a: np.ndarray, b: np.ndarray, *, seed: int = 0) -> RelativeDifference:
    """Return the relative difference of two models' losses [training seeds, clips, ...] on the same clips.

    The interval is a bootstrap over clips and over training seeds: with several of these, it also covers the
    variation between runs, as far as few seeds can show it.
    """
    if a.shape != b.shape or a.ndim < 2 or not a.size:
        raise InputError(
            f"Losses must have the same shape, got {list(a.shape)} and {list(b.shape)}.",
            hint="Measure both on the same clips.",
        )
    x, y = (losses.reshape(*losses.shape[:2], -1).mean(2) for losses in (a, b))
    rng = np.random.default_rng(seed)
    runs, clips = (rng.multinomial(n, [1 / n] * n, BOOTSTRAP_DRAWS).astype(float) for n in x.shape)
    before, after = (((runs @ losses) * clips).sum(1) for losses in (x, y))
    low, high = np.quantile(after / before - 1, (0.025, 0.975))
    return RelativeDifference(float(y.mean() / x.mean() - 1), float(low), float(high))


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
