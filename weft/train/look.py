"""Look: what one attention shows to those who learn from it, profile it and select for it.

Each part is computed when it is first asked for; all ranks ask for the same, at the same time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weft.core.indices import IntArray, split_evenly
from weft.core.mask import BlockMask
from weft.models.context import AttentionContext
from weft.models.scores import block_means, of_my_heads, owned, rows_at
from weft.train import predictor as predicting
from weft.train.cubes import Cubes
from weft.train.predictor import Predictor
from weft.train.profiler import Profile, Seen, profile
from weft.train.select import Masses, Near, Scores, Shares, nearest, select

if TYPE_CHECKING:
    from weft.train.recipe import SparsePart


def once(make: Callable[[Any], Any]) -> Any:
    """A cached_property without the lock of Python 3.11's, in which ranks that are threads would wait."""
    name = f"{make.__name__} was made"

    def made(self: Any) -> Any:
        if name not in vars(self):
            vars(self)[name] = make(self)
        return vars(self)[name]

    return property(made)


class Look:
    """q, k: this rank's, detached, folded to [1, samples × heads, S, D]: each sample has a mask of its own.

    places   of the queries that are learned from and profiled.
    """

    def __init__(  # noqa: PLR0913 - what an attention is
        self, part: SparsePart, predictor: Predictor | None, ctx: AttentionContext, cubes: Cubes,
        places: IntArray, *, q: Tensor, k: Tensor,
    ) -> None:  # fmt: skip
        self.part, self.predictor, self.cubes, self.places = part, predictor, cubes, places
        self.ctx, self.world, self.layout = ctx, ctx.world, cubes.layout(ctx.layout)
        self.samples, self.heads = q.shape[:2]
        k = k.repeat_interleave(self.heads // k.shape[1], 1)
        self.q, self.k = _folded(q), _folded(k)
        self.given = None if predictor is None else predictor.given(ctx, q, k)
        self.own = owned(self.layout)[self.world.comm.rank]
        self.mine = slice(*split_evenly(self.q.shape[1], self.world.comm.size)[self.world.comm.rank])
        """Of the folded heads, this rank's."""

    def learn(self) -> float:
        """Add to the predictor's gradients; its loss."""
        assert self.predictor is not None and self.given is not None
        true = self._true[0].unflatten(0, (self.samples, self.heads))
        x_q, x_k = self._rows(self.given[0]), self.own.of(self.given[1])
        return predicting.learn(self.predictor, self.part.loss, true, x_q, x_k, self.layout.size, self.world)

    @torch.no_grad()
    def profile(self, budgets: Shares | None) -> Profile:
        guess = None
        if self.predictor is not None and self.given is not None:
            low = _folded(self.predictor(self._rows(self.given[0]), 0))
            guess = low[0, self.mine] @ self._low_keys.mT
        true = of_my_heads(self._true.mT, self.layout, self.world)[0].mT
        seen = Seen(self.places, true, guess, self._scores, self.samples)
        return profile(seen, budgets, self.part.mass, self.cubes, self.world)

    @torch.no_grad()
    def select(self, budgets: Shares) -> BlockMask:
        shares = np.tile(budgets, self.samples)
        if self.part.method == "window":
            return nearest(shares, self.cubes)
        return select(self._scores, shares, self.cubes, self.world, self.q.device)

    @once
    def _scores(self) -> Scores:
        cubes, layout, world = self.cubes, self.layout, self.world
        if self.part.method == "window":
            return Near(cubes.nearness.to(self.q.device))
        if self.predictor is None or self.given is None:
            sizes = (self.q, cubes.block), (self.k, cubes.block_k)
            return Masses(*(block_means(x, layout, world, size)[0] for x, size in sizes), block=1)
        low = _folded(self.predictor(self.given[0], 0))
        if self.part.proxy == "centre":
            queries = rows_at(low, layout, world, cubes.middles)[0, self.mine]
        else:
            queries = block_means(low, layout, world, cubes.block)[0]
        return Masses(queries.to(self._low_keys.dtype), self._low_keys, cubes.block_k)

    @once
    def _low_keys(self) -> Tensor:
        """[this rank's heads, all keys, r], scaled."""
        assert self.predictor is not None and self.given is not None
        low = self.predictor(self.own.of(self.given[1]), 1) * self.predictor.scale
        return of_my_heads(_folded(low), self.layout, self.world)[0]

    @once
    def _true(self) -> Tensor:
        """[1, folded heads, places, own keys]: scores."""
        scale = self.q.shape[3] ** -0.5 if self.ctx.scale is None else self.ctx.scale
        rows = self._rows(self.q) * scale
        return rows @ self.own.of(self.k).to(rows.dtype).mT

    def _rows(self, x: Tensor) -> Tensor:
        return rows_at(x, self.layout, self.world, self.places)


def _folded(x: Tensor) -> Tensor:
    return x.flatten(0, 1)[None]
