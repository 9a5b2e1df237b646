"""Rectified flow: straight paths from noise to video; the model predicts the clean video.

    value = weighted_loss(model, add_noise(video, words, generator=generator), video).mean()
    videos = sample(model, words, (16, 3, 64, 64), steps=30, guidance=2.0, generator=generator)

A timestep is the share of noise, from 1 to 0. Models are called as model(noised, timestep, words).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor, nn

from weft.core.errors import InputError

Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]
Generators = Generator | Sequence[Generator] | None
"""One for all samples, or one for each."""
MIN_WEIGHTED_TIMESTEP = 0.15
"""Smaller timesteps get no larger weight: only grain is left to learn."""


class NoisedBatch(NamedTuple):
    """The inputs of a model in training, and the weight of each sample's loss."""

    video: Tensor
    timestep: Tensor
    words: Tensor
    weight: Tensor

    @staticmethod
    def of(video: Tensor, noise: Tensor, timestep: Tensor, words: Tensor) -> NoisedBatch:
        """Interpolate; the weight 1/t² turns errors of the clean video into those of the flow's velocity."""
        t = timestep.reshape(-1, *(1,) * (video.dim() - 1))
        weight = timestep.clamp(min=MIN_WEIGHTED_TIMESTEP) ** -2
        return NoisedBatch((1 - t) * video + t * noise, timestep, words, weight)


def add_noise(
    video: Tensor,
    words: Tensor,
    *,
    generator: Generator | None = None,
    drop: float = 0.1,
    logit_mean: float = 0.0,
) -> NoisedBatch:
    """Draw a logit-normal timestep and noise for each video; drop prompts with probability `drop`."""
    samples = len(video)
    timestep = torch.sigmoid(logit_mean + randn((samples,), generator, video))
    is_dropped = torch.rand(samples, generator=generator, device=_device(generator)) < drop
    words = words.masked_fill(is_dropped.to(words.device)[:, None], 0)
    return NoisedBatch.of(video, randn(video.shape, generator, video), timestep, words)


def weighted_loss(model: Denoiser, batch: NoisedBatch, video: Tensor, edges: float = 0.0) -> Tensor:
    """Return the weighted squared error [B] of the predicted clean videos.

    edges   weight of the error of differences between neighboring pixels: outlines have few pixels. The
            optimum, the mean of all possible videos, is the same with and without.
    """
    error = model(batch.video, batch.timestep, batch.words) - video
    terms = [(1.0, error), *((edges, error.diff(dim=dim)) for dim in (-1, -2) if edges)]
    return batch.weight * sum(scale * term.square().flatten(1).mean(1) for scale, term in terms)


@torch.no_grad()
def sample(  # noqa: PLR0913 - what a call of a pipeline has
    model: nn.Module,
    words: Tensor,
    shape: Sequence[int],
    *,
    negative: Tensor | None = None,
    steps: int = 30,
    guidance: float | Sequence[float] = 2.0,
    shift: float = 1.0,
    pixels: bool = True,
    generator: Generators = None,
    on_step: Callable[[int, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """Return videos [B, *shape] for prompts [B, length], by Euler's method; pixels are from -1 to 1.

    negative   negative prompts, by default empty ones.
    guidance   scale of classifier-free guidance, one for all prompts or one for each; 1 is without.
    shift      see `timesteps`.
    on_step    (index, timestep, videos) -> the videos to continue with.
    """
    if steps < 1:
        raise InputError(f"steps must be >= 1, got {steps}.", hint="Use 20 to 50.")
    x = randn((len(words), *shape), generator, next(model.parameters()))
    schedule = timesteps(steps, shift).to(x)
    scale = torch.as_tensor(guidance, dtype=torch.float64).to(x).reshape(-1, *(1,) * len(shape))
    negative = torch.zeros_like(words) if negative is None else negative
    if len(negative) != len(words) or len(scale) not in (1, len(words)):
        raise InputError(
            f"{len(negative)} negative prompts and {len(scale)} scales of guidance for {len(words)} prompts.",
            hint="Give one for all of them, or one for each.",
        )
    both = torch.cat((negative, words))
    is_guided = bool((scale != 1).any())
    for index, (t, t_next) in enumerate(zip(schedule, schedule[1:], strict=False)):
        if not is_guided:
            clean = model(x, t.expand(len(x)), words)
        else:
            # One call, which `weft.parallelize` splits between two halves of the ranks.
            uncond, clean = model(torch.cat((x, x)), t.expand(2 * len(x)), both).chunk(2)
            # A prompt without guidance gets the bits that it gets in a batch of its own.
            clean = torch.where(scale == 1, clean, uncond + scale * (clean - uncond))
        if pixels:
            # Guidance exceeds the range of pixels, and more with each step.
            clean = clean.clamp(-1, 1)
        x = clean + t_next / t * (x - clean)
        x = x if on_step is None else on_step(index, t, x)
    return x


def timesteps(steps: int, shift: float = 1.0) -> Tensor:
    """Return timesteps from 1 to 0; a larger `shift` concentrates them near 1.

    The more pixels show one thing, the more noise it takes to hide it. A model trained on logit-normal
    timesteps around a mean is sampled with a shift of e^mean, which moves logits by that mean.
    """
    even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * even / (1 + (shift - 1) * even)


def randn(shape: Sequence[int], generator: Generators, like: Tensor) -> Tensor:
    """Draw in float32 on the generator's device, so that a seed means the same on any device, in any dtype.

    Each of several generators draws one sample, the same as in a batch of its own.
    """
    shape = tuple(shape)
    if isinstance(generator, Sequence):
        if len(generator) != shape[0]:
            raise InputError(f"There must be one generator per sample, got {len(generator)} for {shape[0]}.")
        return torch.cat([randn((1, *shape[1:]), each, like) for each in generator])
    return torch.randn(shape, generator=generator, device=_device(generator), dtype=torch.float32).to(like)


def generator(*seeds: int) -> Generator:
    """Return a generator seeded by these numbers only; near numbers give unrelated noise."""
    mixed = np.random.SeedSequence(seeds).generate_state(1, np.uint64)[0]
    return Generator().manual_seed(int(mixed) >> 1)


def _device(generator: Generator | None) -> torch.device | None:
    return None if generator is None else generator.device
