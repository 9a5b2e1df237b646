"""Rectified flow: a straight way from noise to video, of which a model predicts the end.

    value = loss(model, video, words, generator=generator)
    made = sample(model, words, (16, 3, 64, 64), steps=30, guidance=2.0, generator=generator)

A timestep is the share of noise, from 1 to 0. Models are called as model(noised, timestep, words).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from weft.core.errors import InputError

Model = Callable[[Tensor, Tensor, Tensor], Tensor]
Generators = Generator | Sequence[Generator] | None
"""One for all samples, or one for each."""
LEAST = 0.15
"""A smaller share of noise than this weighs no more: there is nothing left to learn but grain."""


class Noised(NamedTuple):
    """What a model is given in training, and how much each sample of it counts."""

    video: Tensor
    timestep: Tensor
    words: Tensor
    weight: Tensor

    @staticmethod
    def of(video: Tensor, noise: Tensor, timestep: Tensor, words: Tensor) -> Noised:
        """The error of a clean video, over the timestep, is that of the direction that the sampler takes;
        hence the weight.
        """
        t = timestep.reshape(-1, *(1,) * (video.dim() - 1))
        return Noised((1 - t) * video + t * noise, timestep, words, timestep.clamp(min=LEAST) ** -2)


def noised(
    video: Tensor, words: Tensor, *, generator: Generator | None = None, drop: float = 0.1, mean: float = 0.0
) -> Noised:
    """Draw a timestep and noise for each video; forget a prompt as often as `drop`, for guidance.

    Timesteps are logit-normal, around 1 / (1 + e^-mean).
    """
    samples = len(video)
    timestep = torch.sigmoid(mean + normal((samples,), generator, video))
    forgets = torch.rand(samples, generator=generator, device=_device(generator)) < drop
    words = words.masked_fill(forgets.to(words.device)[:, None], 0)
    return Noised.of(video, normal(video.shape, generator, video), timestep, words)


def weighted(model: Model, given: Noised, video: Tensor, edges: float = 0.0) -> Tensor:
    """[B]: the squared error of the clean videos that a model predicts, by what each sample counts.

    edges   what its differences between neighbours, across and down, count beside it: outlines have few
            pixels. What is best is the same with and without: the mean of all that is possible.
    """
    error = model(given.video, given.timestep, given.words) - video
    parts = [(1.0, error), *((edges, error.diff(dim=dim)) for dim in (-1, -2) if edges)]
    return given.weight * sum(share * part.square().flatten(1).mean(1) for share, part in parts)


def loss(model: Model, video: Tensor, words: Tensor, **how: Any) -> Tensor:
    """The mean of what is `weighted`; options are those of `noised`."""
    return weighted(model, noised(video, words, **how), video).mean()


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
    """Videos [B, *shape] of prompts [B, length], by Euler's method; pixels are from -1 to 1.

    negative   prompts to go away from, by default empty ones.
    guidance   1 goes by the prompts alone; it may be another for each prompt.
    shift      see `times`.
    on_step    (index, timestep, videos so far) -> what to go on with.
    """
    if steps < 1:
        raise InputError(f"{steps} steps make nothing.", hint="Take 20 to 50.")
    x = normal((len(words), *shape), generator, next(model.parameters()))
    now_and_then = times(steps, shift).to(x)
    scale = torch.as_tensor(guidance, dtype=torch.float64).to(x).reshape(-1, *(1,) * len(shape))
    negative = torch.zeros_like(words) if negative is None else negative
    if len(negative) != len(words) or len(scale) not in (1, len(words)):
        raise InputError(
            f"{len(negative)} negative prompts and {len(scale)} scales of guidance for {len(words)} prompts.",
            hint="Give one for all of them, or one for each.",
        )
    both = torch.cat((negative, words))
    is_guided = bool((scale != 1).any())
    for index, (now, then) in enumerate(zip(now_and_then, now_and_then[1:], strict=False)):
        if not is_guided:
            clean = model(x, now.expand(len(x)), words)
        else:
            # In one call, of which `weft.parallelize` gives a half to each half of the ranks.
            without, clean = model(torch.cat((x, x)), now.expand(2 * len(x)), both).chunk(2)
            # A prompt that is not guided gets the bits that it would get without the others.
            clean = torch.where(scale == 1, clean, without + scale * (clean - without))
        if pixels:
            # Guidance leaves the range of pixels, and would do so more in each step.
            clean = clean.clamp(-1, 1)
        x = clean + then / now * (x - clean)
        x = x if on_step is None else on_step(index, now, x)
    return x


def times(steps: int, shift: float = 1.0) -> Tensor:
    """Timesteps from 1 to 0, of which those near 1 are the closer, the larger `shift` is.

    The more pixels show one thing, the more noise it takes to hide it: a model that was trained on
    logit-normal timesteps around a mean is sampled with a shift of e^mean, which moves logits by that mean.
    """
    even = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * even / (1 + (shift - 1) * even)


def normal(shape: Sequence[int], generator: Generators, like: Tensor) -> Tensor:
    """Drawn in float32 where the generator is: a seed means the same on any device and in any dtype.

    Of several generators each draws for one sample, what it would draw for that one alone.
    """
    shape = tuple(shape)
    if isinstance(generator, Sequence):
        if len(generator) != shape[0]:
            raise InputError(f"{len(generator)} generators are for as many samples, not for {shape[0]}.")
        return torch.cat([normal((1, *shape[1:]), each, like) for each in generator])
    return torch.randn(shape, generator=generator, device=_device(generator), dtype=torch.float32).to(like)


def _device(generator: Generator | None) -> torch.device | None:
    return None if generator is None else generator.device
