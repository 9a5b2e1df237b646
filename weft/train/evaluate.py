"""Evaluate: what a video model learned, in numbers that can be compared from model to model.

    a, b = (held_out_loss(model, source, clips=64) for model in (dense, sparse))
    print(paired(a, b))                       # +0.31% (-0.10% to +0.72%)
    print(compare(generated(a_pipe, prompts), generated(b_pipe, prompts)))   # PSNR 24.1 dB, SSIM 0.912

Clips, timesteps and noise are the same for all models: what differs is the models.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.models import flow
from weft.train.data import HELD_OUT, Captions, Source, generator, to_tensor
from weft.train.likeness import psnr, ssim

TIMESTEPS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8, 0.95)
DRAWS = 4000


@torch.no_grad()
def held_out_loss(
    model: nn.Module,
    source: Source,
    *,
    clips: int = 64,
    timesteps: Sequence[float] = TIMESTEPS,
    seed: int = 0,
    shrink: int = 1,
) -> np.ndarray:
    """The flow loss [clips, timesteps] of clips that nobody trained on, at fixed timesteps and noise.

    The last clips of a set that ends. A clip's noise is its own, so that more clips change none before them.
    """
    if source.size is not None and not 0 < clips <= source.size:
        raise InputError(f"{clips} clips of a set of {source.size}.", hint="Ask for some that it has.")
    first, encode = HELD_OUT if source.size is None else source.size - clips, Captions.of(source).encode
    losses: list[Tensor] = []
    with _resting(model):
        like = next(model.parameters())
        times = torch.tensor(timesteps).to(like)
        for index in range(first, first + clips):
            pixels, [caption] = source.batch([index])
            video = to_tensor(pixels, shrink).to(like)
            noise = flow.normal((len(times), *video.shape[1:]), generator(seed, index), like)
            words = torch.tensor([encode(caption)], device=like.device).expand(len(times), -1)
            losses.append(flow.weighted(model, flow.Noised.of(video, noise, times, words), video))
    return torch.stack(losses).double().cpu().numpy()


def generated(pipe: Any, prompts: Sequence[str], *, seed: int = 0, batch: int = 8, **how: Any) -> np.ndarray:
    """Clips [prompts, T, H, W, 3] from 0 to 1; the same noise for the same seed, places and batch."""
    made: list[np.ndarray] = []
    with _resting(pipe.transformer):
        for start in range(0, len(prompts), batch):
            some = list(prompts[start : start + batch])
            made.extend(pipe(some, generator=generator(seed, start), **how).frames)
    return np.stack(made)


class Likeness(NamedTuple):
    """Of each clip to its counterpart."""

    psnr: np.ndarray
    ssim: np.ndarray

    def __str__(self) -> str:
        return f"PSNR {self.psnr.clip(max=100).mean():.1f} dB, SSIM {self.ssim.mean():.3f}"


def compare(a: np.ndarray, b: np.ndarray) -> Likeness:
    """Clips of two models for the same prompts and seed."""
    return Likeness(psnr(a, b), ssim(a, b))


@dataclass(frozen=True)
class Difference:
    """By how much the second is larger than the first, as a share of it, and the 95 % interval."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.2%} ({self.low:+.2%} to {self.high:+.2%})"


def paired(a: np.ndarray, b: np.ndarray, *, seeds: bool = False, seed: int = 0) -> Difference:
    """The relative difference of two models' losses [clips, ...] on the same clips.

    With seeds=True they are [training seeds, clips, ...]. The interval is a bootstrap that draws clips, and
    the seeds too: it then tells of other clips and of other runs, as far as the few that there are can.
    """
    if a.shape != b.shape or a.ndim < 1 + seeds or not a.size:
        raise InputError(f"Losses of shapes {a.shape} and {b.shape}.", hint="Measure both on the same clips.")
    shape = a.shape[:2] if seeds else (1, len(a))
    x, y = (each.reshape(*shape, -1).mean(2) for each in (a, b))
    rng = np.random.default_rng(seed)
    runs, clips = (rng.multinomial(n, [1 / n] * n, DRAWS).astype(float) for n in x.shape)
    before, after = (((runs @ each) * clips).sum(1) for each in (x, y))
    low, high = np.quantile(after / before - 1, (0.025, 0.975))
    return Difference(float(y.mean() / x.mean() - 1), float(low), float(high))


@contextmanager
def _resting(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
