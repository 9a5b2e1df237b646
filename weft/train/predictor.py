"""Predictor: predict attention scores from low-rank queries and keys.

    predictor = Predictor(config, heads=6, width=192, seed=0)
    low_q, low_k = (predictor(x, side) for side, x in enumerate(predictor.inputs(ctx, q, k)))
    predicted = low_q @ low_k.mT * predictor.scale      # of q @ k.mT * scale, both [B, H, queries, keys]

It learns from sampled queries against all keys, on whichever ranks they are: the loss is a function of sums
over keys, and each rank has its terms of the sums and of the graph. The ranks' gradients add up to that of
one process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from weft.core.errors import InputError
from weft.run.kernels.proxies import elements_per_chunk
from weft.run.switch import all_gather
from weft.run.world import World
from weft.sparse.context import AttentionContext

if TYPE_CHECKING:
    from weft.train.recipe import SparseConfig


class Predictor(nn.Module):
    """Low-rank maps of the queries (side 0) and keys (side 1) of one attention, in float32.

    source "qk" takes queries and keys after norm and rotation; "hidden" takes the attention module's input.
    """

    def __init__(self, config: SparseConfig, *, heads: int, width: int, seed: int) -> None:
        super().__init__()
        self.source = config.source
        in_features = width // heads if config.source == "qk" else width
        rank = min(config.rank, width // heads)
        self.scale = rank**-0.5
        numbers = torch.randn(2, heads, in_features, rank, generator=torch.Generator().manual_seed(seed))
        if config.source == "qk":
            # The same random projection for both: scores are right up to noise.
            maps = torch.linalg.qr(numbers[0])[0] * (in_features / rank) ** 0.25
            numbers = torch.stack((maps, maps))
        else:
            numbers *= (2 / in_features) ** 0.5
        self.maps, self.bias = nn.Parameter(numbers), nn.Parameter(torch.zeros(2, heads, 1, rank))

    def inputs(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Return its inputs [B, heads or 1, S, D] for this rank's queries and keys."""
        if self.source == "qk":
            return q, k
        hidden = ctx.hidden
        if hidden is None or hidden.shape[:-1] != (q.shape[0], q.shape[2]):
            raise InputError(
                f"{ctx.name} attends from tokens that are not its first argument.",
                hint='Use source = "qk", which needs queries and keys only.',
            )
        hidden = hidden.detach()[:, None]
        return hidden, hidden

    def forward(self, x: Tensor, side: int) -> Tensor:
        """Return [B, H, S, rank]."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        maps, bias = self.maps[side].to(x.dtype), self.bias[side].to(x.dtype)
        if self.source == "qk":
            return x @ maps + bias
        # One product for all heads, which have the same input.
        low = x[:, 0] @ maps.transpose(0, 1).flatten(1)
        return low.unflatten(2, (len(maps), -1)).transpose(1, 2) + bias


class PredictorLoss(NamedTuple):
    """A loss of true and predicted scores [rows, keys], as a function of sums over keys."""

    sums: Callable[[Tensor, Tensor], Tensor]
    """Return [numbers, rows] of this rank's keys."""
    value: Callable[[Tensor, Tensor, int, int], Tensor]
    """Return […] of all ranks' sums [ranks, numbers, …], the own ones with a graph, the rank, all keys."""


def _softmax_sums(true: Tensor, predicted: Tensor) -> Tensor:
    none = true.new_full(true.shape[:1], -torch.inf)
    tops = torch.stack([x.detach().amax(1) if x.shape[1] else none for x in (true, predicted)])
    weight = (true - tops[0, :, None]).exp()
    other = (predicted - tops[1, :, None]).exp().sum(1)
    dot = torch.linalg.vecdot
    return torch.cat((tops, torch.stack((weight.sum(1), dot(weight, true), dot(weight, predicted), other))))


def _kl_divergence(every: Tensor, own: Tensor, rank: int, _keys: int) -> Tensor:
    """KL divergence of the two softmaxes."""
    best = every[:, :2].amax(0)
    shrink = (every[:, :2] - best).exp()[:, [0, 0, 0, 1]]
    mass, true, predicted, other = _with_graph(every[:, 2:] * shrink, own[2:] * shrink[rank])
    return (true - predicted) / mass - (best[0] + mass.log()) + (best[1] + other.log())


def _moments(true: Tensor, predicted: Tensor) -> Tensor:
    dot = torch.linalg.vecdot
    sums = true.sum(1), predicted.sum(1)
    return torch.stack((*sums, dot(true, true), dot(predicted, predicted), dot(true, predicted)))


def _correlation(every: Tensor, own: Tensor, _rank: int, keys: int) -> Tensor:
    """1 - Pearson's correlation."""
    a, b, aa, bb, ab = _with_graph(every, own)
    return 1 - (ab - a * b / keys) * ((aa - a * a / keys) * (bb - b * b / keys)).clamp(min=1e-30).rsqrt()


def _published(every: Tensor, own: Tensor, _rank: int, keys: int) -> Tensor:
    """DSV's published loss: cosine distance and the squared distance of unit rows, which is 2 - 2 cos."""
    _, _, aa, bb, ab = _with_graph(every, own)
    distance = 1 - ab * (aa * bb).clamp(min=1e-30).rsqrt()
    return 0.95 * distance + 0.05 * 2 * distance / keys


def _with_graph(every: Tensor, own: Tensor) -> Tensor:
    """Sum over ranks; only this rank's term has a gradient."""
    return every.sum(0) - own.detach() + own


LOSSES = {
    "kl": PredictorLoss(_softmax_sums, _kl_divergence),
    "pearson": PredictorLoss(_moments, _correlation),
    "dsv": PredictorLoss(_moments, _published),
}


def loss_backward(  # noqa: PLR0913 - one sample of an attention
    predictor: Predictor, loss: str, true: Tensor, x_q: Tensor, x_k: Tensor, keys: int, world: World
) -> float:
    """Add the gradients of sampled queries to a predictor's; return the loss, the same on all ranks.

    true are scores [B, H, rows, own keys]; x_q and x_k the predictor's inputs of these rows and keys. Rows
    are processed in chunks, twice: for the sums, and for the gradients through them.
    """
    # Without the hooks of gradient checkpointing, which would expect these tensors to be recomputed.
    no_hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach(), lambda x: x)
    with torch.enable_grad(), no_hooks:
        low = predictor(x_q, 0) * predictor.scale, predictor(x_k, 1)
        low_q, low_k = (x.detach() for x in low)
        grad_q, grad_k = torch.zeros_like(low_q), torch.zeros_like(low_k)
        sums, value = LOSSES[loss]
        rows = max(1, elements_per_chunk(true.device) // 4 // max(1, true.shape[3]))
        chunks = [
            (*head, slice(row, row + rows))
            for head in np.ndindex(true.shape[:2])
            for row in range(0, true.shape[2], rows)
        ]
        with torch.no_grad():
            terms = [sums(true[chunk], low_q[chunk] @ low_k[chunk[:2]].mT) for chunk in chunks]
        own = torch.cat(terms, 1).unflatten(1, true.shape[:3]).double().requires_grad_()
        every = all_gather(own.detach(), mesh=world, stage="predictor")
        mean = value(every, own, world.comm.rank, keys).mean()
        (grad_sums,) = torch.autograd.grad(mean, own)
        for chunk in chunks:
            q, k = low_q[chunk].requires_grad_(), low_k[chunk[:2]].requires_grad_()
            again = sums(true[chunk], q @ k.mT)
            of_q, of_k = torch.autograd.grad(again, (q, k), grad_sums[(slice(None), *chunk)].to(true.dtype))
            grad_q[chunk] = of_q
            grad_k[chunk[:2]] += of_k
        weights = list(predictor.parameters())
        grads = torch.autograd.grad(low, weights, (grad_q, grad_k))
    for weight, grad in zip(weights, grads, strict=True):
        weight.grad = grad if weight.grad is None else weight.grad.add_(grad)
    return mean.item()
