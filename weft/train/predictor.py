"""Predictor: what attention scores will be, guessed from vectors of few numbers.

    predictor = Predictor(part, heads=6, width=192, seed=0)
    low_q, low_k = (predictor(x, side) for side, x in enumerate(predictor.given(ctx, q, k)))
    guess = low_q @ low_k.mT * predictor.scale          # of q @ k.mT * scale, both [B, H, queries, keys]

It learns from sampled queries against all keys, wherever those are: a loss is a function of sums over keys,
each rank has its part of the sums, and of the graph. So the ranks' gradients add up to that of one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.models.context import AttentionContext
from weft.run.kernels.proxies import at_a_time
from weft.run.switch import everyone
from weft.run.world import World

if TYPE_CHECKING:
    from weft.train.recipe import SparsePart


class Predictor(nn.Module):
    """Low-rank maps of the queries (side 0) and keys (side 1) of one attention, in float32.

    source "qk" is what attention compares, after rotations and norms; "hidden" is what the module was given.
    """

    def __init__(self, part: SparsePart, *, heads: int, width: int, seed: int) -> None:
        super().__init__()
        self.source = part.source
        wide = width // heads if part.source == "qk" else width
        rank = min(part.rank, width // heads)
        self.scale = rank**-0.5
        numbers = torch.randn(2, heads, wide, rank, generator=torch.Generator().manual_seed(seed))
        if part.source == "qk":
            # The same part of the space for both, as if it were all: scores are right but for noise.
            maps = torch.linalg.qr(numbers[0])[0] * (wide / rank) ** 0.25
            numbers = torch.stack((maps, maps))
        else:
            numbers *= (2 / wide) ** 0.5
        self.maps, self.bias = nn.Parameter(numbers), nn.Parameter(torch.zeros(2, heads, 1, rank))

    def given(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """What it looks at, [B, heads or 1, S, D] of this rank's queries and of its keys."""
        if self.source == "qk":
            return q, k
        hidden = ctx.hidden
        if hidden is None or hidden.shape[:-1] != (q.shape[0], q.shape[2]):
            raise InputError(
                f"{ctx.name} attends from tokens that are not its first argument.",
                hint='Use source = "qk": it needs nothing but queries and keys.',
            )
        hidden = hidden.detach()[:, None]
        return hidden, hidden

    def forward(self, x: Tensor, side: int) -> Tensor:
        """[B, H, S, rank]"""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        maps, bias = self.maps[side].to(x.dtype), self.bias[side].to(x.dtype)
        if self.source == "qk":
            return x @ maps + bias
        # One product for all heads: they look at the same.
        found = x[:, 0] @ maps.transpose(0, 1).flatten(1)
        return found.unflatten(2, (len(maps), -1)).transpose(1, 2) + bias


class Loss(NamedTuple):
    """Of true scores and guesses [rows, keys], by their sums over keys."""

    sums: Callable[[Tensor, Tensor], Tensor]
    """[numbers, rows] of this rank's keys."""
    value: Callable[[Tensor, Tensor, int, int], Tensor]
    """[…] of every rank's sums [ranks, numbers, …], of its own, with a graph, of its rank and all keys."""


def _softmaxes(true: Tensor, guess: Tensor) -> Tensor:
    none = true.new_full(true.shape[:1], -torch.inf)
    tops = torch.stack([x.detach().amax(1) if x.shape[1] else none for x in (true, guess)])
    weight = (true - tops[0, :, None]).exp()
    other = (guess - tops[1, :, None]).exp().sum(1)
    dot = torch.linalg.vecdot
    return torch.cat((tops, torch.stack((weight.sum(1), dot(weight, true), dot(weight, guess), other))))


def _divergence(every: Tensor, own: Tensor, rank: int, _keys: int) -> Tensor:
    """Kullback and Leibler's, of the two softmaxes."""
    best = every[:, :2].amax(0)
    shrink = (every[:, :2] - best).exp()[:, [0, 0, 0, 1]]
    mass, seen, guessed, other = _with_graph(every[:, 2:] * shrink, own[2:] * shrink[rank])
    return (seen - guessed) / mass - (best[0] + mass.log()) + (best[1] + other.log())


def _moments(true: Tensor, guess: Tensor) -> Tensor:
    dot = torch.linalg.vecdot
    return torch.stack((true.sum(1), guess.sum(1), dot(true, true), dot(guess, guess), dot(true, guess)))


def _correlation(every: Tensor, own: Tensor, _rank: int, keys: int) -> Tensor:
    """1 - Pearson's."""
    a, b, aa, bb, ab = _with_graph(every, own)
    return 1 - (ab - a * b / keys) * ((aa - a * a / keys) * (bb - b * b / keys)).clamp(min=1e-30).rsqrt()


def _published(every: Tensor, own: Tensor, _rank: int, keys: int) -> Tensor:
    """DSV's: of the cosine, and of the squared distance of rows of length 1, which is 2 - 2 cos."""
    _, _, aa, bb, ab = _with_graph(every, own)
    apart = 1 - ab * (aa * bb).clamp(min=1e-30).rsqrt()
    return 0.95 * apart + 0.05 * 2 * apart / keys


def _with_graph(every: Tensor, own: Tensor) -> Tensor:
    """The sum over ranks, of which this rank's part has a gradient."""
    return every.sum(0) - own.detach() + own


LOSSES = {
    "kl": Loss(_softmaxes, _divergence),
    "pearson": Loss(_moments, _correlation),
    "dsv": Loss(_moments, _published),
}


def learn(  # noqa: PLR0913 - one sample of an attention
    predictor: Predictor, loss: str, true: Tensor, x_q: Tensor, x_k: Tensor, keys: int, world: World
) -> float:
    """Add what sampled queries tell to the gradients of a predictor; the loss, the same on all ranks.

    true are scores [B, H, rows, own keys]; x_q and x_k what the predictor is given of these rows and keys.
    Few rows at a time: first their sums, then what these have to do with the gradient.
    """
    # Hooks of gradient checkpointing would expect these tensors to be made again.
    plain = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x)
    with torch.enable_grad(), plain:
        low = predictor(x_q, 0) * predictor.scale, predictor(x_k, 1)
        low_q, low_k = (x.detach() for x in low)
        slopes = torch.zeros_like(low_q), torch.zeros_like(low_k)
        sums, value = LOSSES[loss]
        some = max(1, at_a_time(true.device) // 4 // max(1, true.shape[3]))
        parts = [
            (*head, slice(row, row + some))
            for head in np.ndindex(true.shape[:2])
            for row in range(0, true.shape[2], some)
        ]
        with torch.no_grad():
            found = [sums(true[part], low_q[part] @ low_k[part[:2]].mT) for part in parts]
        own = torch.cat(found, 1).unflatten(1, true.shape[:3]).double().requires_grad_()
        every = everyone(own.detach(), mesh=world, stage="predictor")
        mean = value(every, own, world.comm.rank, keys).mean()
        (slope,) = torch.autograd.grad(mean, own)
        for part in parts:
            given = [low_q[part].requires_grad_(), low_k[part[:2]].requires_grad_()]
            again = sums(true[part], given[0] @ given[1].mT)
            of_q, of_k = torch.autograd.grad(again, given, slope[(slice(None), *part)].to(true.dtype))
            slopes[0][part] = of_q
            slopes[1][part[:2]] += of_k
        weights = list(predictor.parameters())
        grads = torch.autograd.grad(low, weights, slopes)
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
    return mean.item()
