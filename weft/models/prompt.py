"""Prompt: the words of a VideoDiT, as its tokens and as one vector."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd, lcm

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW = 4
"""Of fewer rows than this, BLAS computes a product another way than of more (measured: MKL, float32)."""
LANES = 32
"""Numbers that torch takes at once where there is AVX-512; it rounds those that are left in another way."""


class Prompt(nn.Module):
    """Words [B, length] as tokens in their places, and as one vector that knows the places too."""

    def __init__(self, words: int, length: int, width: int, phrase: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.place = nn.Parameter(torch.randn(length, width) * 0.2)
        self.mix = nn.Parameter(torch.randn(length, width) / length**0.5)
        self.whole = nn.Linear(width, width)
        self.phrase = phrase
        if phrase:
            self.norm = nn.LayerNorm(width, elementwise_affine=False)
            self.mlp = nn.Sequential(
                nn.Linear(width, 2 * width), nn.GELU("tanh"), nn.Linear(2 * width, width)
            )

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embed(words)
        whole, x = by_row(self.whole, (x * self.mix).sum(1)), x + self.place
        if not self.phrase:
            return x, whole
        # Each word with what its phrase says: a patch that knows its colour need not look for its kind.
        told = by_row(self.mlp, self.norm(x.unflatten(1, (-1, self.phrase)).sum(2)))
        return x + told.repeat_interleave(self.phrase, 1), whole


def by_row(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A layer of a row or some for each sample, whose bits are the same whatever samples are beside it."""
    x, shape = x.flatten(0, -2), x.shape[:-1]
    rows = lcm(FEW, LANES // gcd(LANES, x.shape[1]))
    return layer(F.pad(x, (0, 0, 0, -len(x) % rows)))[: len(x)].unflatten(0, shape)
