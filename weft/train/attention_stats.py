"""AttentionStats: statistics of one attention call, shared by the predictor, the profiler and the selector.

Each statistic is computed when it is first used; all ranks must use the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.indices import IntArray, split_evenly
from weft.core.mask import BlockMask
from weft.run.kernels.proxies import elements_per_chunk
from weft.run.switch import gather
from weft.sparse.context import AttentionContext
from weft.sparse.pooling import block_means, gather_rows, owned_tokens, switch_to_heads
from weft.train.cubes import BlockScores, Cubes, Shares
from weft.train.predictor import Predictor, loss_backward

if TYPE_CHECKING:
    from weft.train.recipe import SparseConfig


@dataclass(frozen=True, eq=False)
class Profile:
    """How sparse an attention is, and how good a selection, on sampled queries; arrays are by head."""

    needed: Shares
    """Share of key blocks whose best, as they are selected for groups of queries, hold `mass`."""
    sparsity: Shares
    """1 - the share of critical keys: those that hold `mass` of a query's softmax."""
    coverage: float
    """Mass selected at the present budgets; in a dense block, of as many predicted keys as are critical."""
    recall: float
    """Mass selected, relative to that of each query's own best blocks, equally many."""
    keys: float
    """Mass of as many single predicted keys as are critical, relative to `mass`."""


def cached(compute: Callable[[Any], Any]) -> Any:
    """Like cached_property, without the lock of Python 3.11's, on which ranks that are threads would wait."""
    name = f"cached {compute.__name__}"

    def get(self: Any) -> Any:
        if name not in vars(self):
            vars(self)[name] = compute(self)
        return vars(self)[name]

    return property(get)


class AttentionStats:
    """q, k: this rank's, detached, folded to [1, samples × heads, S, D]: each sample has a mask of its own.

    places   positions of the queries that are learned from and profiled.
    """

    def __init__(  # noqa: PLR0913 - what an attention is
        self, config: SparseConfig, predictor: Predictor | None, ctx: AttentionContext, cubes: Cubes,
        places: IntArray, *, q: Tensor, k: Tensor,
    ) -> None:  # fmt: skip
        self.config, self.predictor, self.cubes, self.places = config, predictor, cubes, places
        self.ctx, self.world, self.layout = ctx, ctx.world, cubes.layout(ctx.layout)
        self.samples, self.heads = q.shape[:2]
        k = k.repeat_interleave(self.heads // k.shape[1], 1)
        self.q, self.k = _folded(q), _folded(k)
        self.inputs = None if predictor is None else predictor.inputs(ctx, q, k)
        self.own = owned_tokens(self.layout)[self.world.comm.rank]
        self.local_heads = slice(*split_evenly(self.q.shape[1], self.world.comm.size)[self.world.comm.rank])
        """This rank's share of the folded heads."""

    def learn(self) -> float:
        """Add to the predictor's gradients; return its loss."""
        assert self.predictor is not None and self.inputs is not None
        scores = self._scores[0].unflatten(0, (self.samples, self.heads))
        x_q, x_k = self._rows(self.inputs[0]), self.own.of(self.inputs[1])
        return loss_backward(self.predictor, self.config.loss, scores, x_q, x_k, self.layout.size, self.world)

    @torch.no_grad()
    def profile(self, budgets: Shares | None) -> Profile:
        """Profile the sampled queries; the result is the same on all ranks, averaged over samples."""
        predicted = None
        if self.predictor is not None and self.inputs is not None:
            low = _folded(self.predictor(self._rows(self.inputs[0]), 0))
            predicted = low[0, self.local_heads] @ self._low_keys.mT
        cubes, mass, world = self.cubes, self.config.mass, self.world
        weights = switch_to_heads(self._scores.mT, self.layout, world)[0].mT.double().softmax(-1)
        curves, single = weights.new_zeros(len(weights), 2, cubes.cols), weights.new_zeros(len(weights), 2)
        groups = torch.from_numpy(self.places // cubes.block)
        always_kept = cubes.kept[groups].to(weights.device)
        block_scores = self._block_scores  # communicates: also on ranks without heads
        for head, probs in enumerate(weights):
            blocks = F.pad(probs, (0, -probs.shape[1] % cubes.block_k)).unflatten(1, (cubes.cols, -1)).sum(2)
            scores = block_scores(head, groups).masked_fill(always_kept, torch.inf)
            order = scores.sort(descending=True, stable=True)[1]
            curves[head, 0] = blocks.gather(1, order).cumsum(1).mean(0)
            curves[head, 1] = blocks.sort(descending=True)[0].cumsum(1).mean(0)
            single[head] = _critical_keys(probs, mass, None if predicted is None else predicted[head])
        numbers = torch.cat((curves.flatten(1), single), 1)
        heads = sum(count for (count,) in world.comm.all_gather_ints([len(numbers)]))
        dims = {"head": heads, "number": numbers.shape[1]}
        numbers = gather(numbers, "head", dims=dims, mesh=world, stage="profile").cpu().numpy()
        return _summarize(numbers.reshape(self.samples, -1, dims["number"]).mean(0), budgets, mass, cubes)

    @torch.no_grad()
    def select(self, budgets: Shares) -> BlockMask:
        shares = np.tile(budgets, self.samples)
        if self.config.method == "window":
            return self.cubes.select_nearest(shares)
        return self.cubes.select(self._block_scores, shares, self.world, self.q.device)

    @cached
    def _block_scores(self) -> BlockScores:
        cubes, layout, world = self.cubes, self.layout, self.world
        if self.config.method == "window":
            proximity = cubes.proximity.to(self.q.device)
            return lambda _, rows: proximity[rows]
        if self.predictor is None or self.inputs is None:
            sizes = (self.q, cubes.block), (self.k, cubes.block_k)
            return key_mass(*(block_means(x, layout, world, size)[0] for x, size in sizes), block=1)
        low = _folded(self.predictor(self.inputs[0], 0))
        if self.config.proxy == "center":
            queries = gather_rows(low, layout, world, cubes.centers)[0, self.local_heads]
        else:
            queries = block_means(low, layout, world, cubes.block)[0]
        return key_mass(queries.to(self._low_keys.dtype), self._low_keys, cubes.block_k)

    @cached
    def _low_keys(self) -> Tensor:
        """[this rank's heads, all keys, r], scaled."""
        assert self.predictor is not None and self.inputs is not None
        low = self.predictor(self.own.of(self.inputs[1]), 1) * self.predictor.scale
        return switch_to_heads(_folded(low), self.layout, self.world)[0]

    @cached
    def _scores(self) -> Tensor:
        """[1, folded heads, places, own keys]."""
        scale = self.q.shape[3] ** -0.5 if self.ctx.scale is None else self.ctx.scale
        rows = self._rows(self.q) * scale
        return rows @ self.own.of(self.k).to(rows.dtype).mT

    def _rows(self, x: Tensor) -> Tensor:
        return gather_rows(x, self.layout, self.world, self.places)


def key_mass(queries: Tensor, keys: Tensor, block: int) -> BlockScores:
    """Score by a query of each block [heads, rows, r] and keys [heads, keys, r], `block` of them a block.

    A key block scores the sum of the exponentials of its keys: a mean of keys would hide the one that counts.
    """
    chunk = max(1, elements_per_chunk(keys.device) // keys.shape[1])

    def of_chunk(queries: Tensor, keys: Tensor) -> Tensor:
        scores = queries @ keys
        if block == 1:
            return scores
        scores.sub_(scores.amax(1, keepdim=True)).exp_()  # no log, which would not change the order
        full = scores.shape[1] // block * block
        mass = scores[:, :full].unflatten(1, (-1, block)).sum(-1)
        if full == scores.shape[1]:
            return mass
        return torch.cat((mass, scores[:, full:].sum(1, keepdim=True)), 1)

    return lambda head, rows: torch.cat(
        [of_chunk(some, keys[head].mT) for some in queries[head, rows].split(chunk)]
    )


def _folded(x: Tensor) -> Tensor:
    return x.flatten(0, 1)[None]


def _critical_keys(weights: Tensor, mass: float, predicted: Tensor | None) -> Tensor:
    """Return the share of critical keys and the mass of as many predicted ones, averaged over queries."""
    sums = weights.sort(descending=True)[0].cumsum(1)
    count = (sums < mass - 1e-12).sum(1, keepdim=True).clamp(max=sums.shape[1] - 1)
    if predicted is not None:
        sums = weights.gather(1, predicted.sort(descending=True)[1]).cumsum(1)
    return torch.stack(((count + 1).double().mean() / sums.shape[1], sums.gather(1, count).mean()))


def _summarize(
    numbers: npt.NDArray[np.float64], budgets: Shares | None, mass: float, cubes: Cubes
) -> Profile:
    heads, single = np.arange(len(numbers)), numbers[:, -2:]
    curves = numbers[:, :-2].reshape(len(numbers), 2, cubes.cols)
    needed = (curves[:, 0] < mass - 1e-9).sum(1).clip(max=cubes.cols - 1) + 1
    counts = needed if budgets is None else np.array([cubes.blocks(share) for share in budgets])
    selected, best = curves[heads, :, counts - 1].T
    is_sparse = counts < cubes.cols  # heads that keep all keys say nothing about the selection
    is_sparse = is_sparse if is_sparse.any() else ~is_sparse
    return Profile(
        needed=needed / cubes.cols,
        sparsity=1 - single[:, 0],
        coverage=float((single[:, 1] if budgets is None else selected[is_sparse]).mean()),
        recall=float((selected / best)[is_sparse].mean()),
        keys=float(single[:, 1].mean() / mass),
    )
