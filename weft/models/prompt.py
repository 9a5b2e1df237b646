"""Prompt: the words of a VideoDiT, and how tokens read the phrase that tells of them."""

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
    """Words [B, length] as tokens in their places, as one vector that knows the places too, and by phrase."""

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

    def forward(self, words: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.embed(words)
        whole, x = by_row(self.whole, (x * self.mix).sum(1)), x + self.place
        if not self.phrase:
            return x, whole, x[:, :0]
        # Each word with what its phrase says: a patch that knows its colour need not look for its kind.
        told = by_row(self.mlp, self.norm(x.unflatten(1, (-1, self.phrase)).sum(2)))
        return x + told.repeat_interleave(self.phrase, 1), whole, told


class Read(nn.Module):
    """What a token takes from the phrases [B, P, width], each by how well it fits, or from none of them.

    Words are few among the keys of an attention, so it learns late which of two phrases a patch is about;
    here there is nothing else to look at. A row's bits do not depend on the rows beside it.
    """

    def __init__(self, width: int, channels: int) -> None:
        super().__init__()
        self.ask, self.name = (nn.Linear(width, channels, bias=False) for _ in range(2))
        self.tell = nn.Linear(width, width, bias=False)
        nn.init.zeros_(self.tell.weight)

    def forward(self, x: Tensor, phrases: Tensor) -> Tensor:
        asked, names, told = self.ask(x), by_row(self.name, phrases), by_row(self.tell, phrases)
        fits = [(asked * names[:, p : p + 1]).sum(-1) for p in range(phrases.shape[1])]
        none = torch.zeros_like(fits[0])
        shares = (torch.stack([*fits, none], -1) * asked.shape[-1] ** -0.5).softmax(-1)
        return sum(shares[..., p : p + 1] * told[:, p : p + 1] for p in range(len(fits)))  # type: ignore[return-value]


def by_row(layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A layer of a row or some for each sample, whose bits are the same whatever samples are beside it."""
    x, shape = x.flatten(0, -2), x.shape[:-1]
    rows = lcm(FEW, LANES // gcd(LANES, x.shape[1]))
    return layer(F.pad(x, (0, 0, 0, -len(x) % rows)))[: len(x)].unflatten(0, shape)
