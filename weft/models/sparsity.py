"""Sparsity: the masks of a pipeline's attentions by layer and step, and an account of them.

    sparsity = Sparsity("topk:0.2")
    mask = sparsity.mask(ctx, q, k)                 # in every sharded attention
    print(sparsity.summary())

All ranks must ask in the same order: some masks are made together.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.indices import IntArray
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.models.context import AttentionContext, SparseAttention
from weft.models.methods import Rules, parse
from weft.models.scores import kept_mass, sample
from weft.plan.counts import head_loads

EVERY = 11  # one sparse call in so many is judged; few models have a multiple of it as layers


class Kept(NamedTuple):
    """The mask of a layer, the step it was made in, and the last that used it."""

    since: int
    last: int
    mask: BlockMask | None


NOTHING = Kept(-(1 << 30), 0, None)


def sparse_attention(given: Any) -> SparseAttention:
    """What was given for sparse=, as an object of the protocol; names are wrapped by their rules."""
    if isinstance(given, str):
        return Sparsity(given)
    if not callable(getattr(given, "mask", None)):
        raise InputError(
            f"sparse is a {type(given).__name__}.",
            hint='Give "sta", "svg", "radial", "topk:0.2" or an object with mask(ctx, q, k).',
        )
    return given if hasattr(given, "finish") else Sparsity(given)


class Sparsity:
    """Masks by a spec (see `models.methods`) or by an object with `mask`, for one transformer."""

    def __init__(self, sparse: str | SparseAttention) -> None:
        self.name = sparse if isinstance(sparse, str) else type(sparse).__name__
        self.source, self.rules = parse(sparse) if isinstance(sparse, str) else (sparse, Rules())
        self.changes = getattr(self.source, "changes", True)
        self._layouts: dict[Any, Layout] = {}
        self._kept: dict[tuple[int, int, Layout], Kept] = {}
        self._before: dict[tuple[int, int, int], Kept] = {}
        """By layer, branch and tokens: what an attention is on any number of ranks."""
        self.reset()

    def reset(self) -> None:
        """A new run: masks are made anew, and so is the account."""
        self._kept = {place: kept._replace(since=NOTHING.since) for place, kept in self._kept.items()}
        self._before = {}
        self._dense = self._renewals = 0
        self._densities: list[float] = []
        self._density: dict[str, float] = {}
        self._recalls: list[float] = []

    def state(self, step: int) -> list[Any]:
        """The masks that a step needs of the ones before, as what a `models.state` can hold."""
        return [
            [layer, branch, layout.size, kept.since, _parts(kept.mask)]
            for (layer, branch, layout), kept in self._kept.items()
            if kept.since > step - self.rules.refresh
        ]

    def go_on(self, state: list[Any]) -> None:
        """From that state, here or on other ranks, after a `reset`."""
        self._before = {
            (layer, branch, tokens): Kept(since, since, BlockMask(**parts) if parts else None)
            for layer, branch, tokens, since, parts in state
        }

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask | None:
        """The mask of a call; the same one, not an equal one, as long as nothing changes.

        Asked again for a step, as by gradient checkpointing, it answers the same and nothing is sent.
        """
        mask = None if self.rules.is_dense(ctx) else self._mask(ctx, q, k)
        if mask is None:
            self._dense += 1
            return None
        if len(self._densities) % EVERY == 0 and self.rules.recall:
            self._recalls.append(self._recall(ctx, q, k, mask))
        if mask.digest not in self._density:
            pairs = mask.heads * mask.q_len * mask.kv_len
            self._density[mask.digest] = int(head_loads(mask).sum()) / pairs
        self._densities.append(self._density[mask.digest])
        return mask

    def tokens(self, ctx: AttentionContext) -> Layout:
        """The layout, with the tokens in the order that the masks are in."""
        grid, layout = ctx.grid, ctx.layout
        if grid.tokens != layout.size:
            raise InputError(f"{grid} has {grid.tokens} tokens, the attention {layout.size}.")
        tile = getattr(self.source, "tile", None)
        if tile is None:
            return layout
        if (grid, layout) not in self._layouts:
            self._layouts[grid, layout] = reordered(layout, grid.voxels(tile).inverse)
        return self._layouts[grid, layout]

    def _mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask | None:
        place = ctx.layer, ctx.branch, ctx.layout
        kept = self._kept.get(place, NOTHING)
        if ctx.step < kept.last or kept.since == NOTHING.since:  # another run
            kept = self._of_more_ranks(ctx) or kept._replace(since=NOTHING.since)
        if not kept.since <= ctx.step < kept.since + self.rules.refresh:
            kept = self._renewed(ctx, q, k, kept)
        self._kept[place] = kept._replace(last=ctx.step)
        return kept.mask

    def _of_more_ranks(self, ctx: AttentionContext) -> Kept | None:
        """What was kept when all ranks computed what now some of them do: they all know it, and keep it."""
        found = (
            kept
            for (layer, branch, layout), kept in self._kept.items()
            if (layer, branch, layout.size) == (ctx.layer, ctx.branch, ctx.layout.size)
            and layout.ranks > ctx.layout.ranks
            and kept.since != NOTHING.since
        )
        return next(found, None)

    def _renewed(self, ctx: AttentionContext, q: Tensor, k: Tensor, kept: Kept) -> Kept:
        before, old = self._before.get((ctx.layer, ctx.branch, ctx.layout.size), NOTHING), kept.mask
        if before.since <= ctx.step < before.since + self.rules.refresh:
            since, mask = before.since, old if before.mask == old else before.mask
        else:
            since, mask = ctx.step, self._ask(ctx, q, k, old)
        if old is not None and mask is not old:
            self._renewals += mask is not None and kept.since != NOTHING.since
        return Kept(since, ctx.step, mask)

    def _ask(self, ctx: AttentionContext, q: Tensor, k: Tensor, old: BlockMask | None) -> BlockMask | None:
        with torch.no_grad():
            mask = self.source.mask(replace(ctx, layout=self.tokens(ctx)), q.detach(), k.detach())
        if mask is None or mask.is_dense:
            return None
        have, want = mask.grid[:3], (ctx.heads, ctx.layout.size, ctx.layout.size)
        if have != want:
            raise InputError(
                f"{self.name} made a mask for (heads, queries, keys) {have}; layer {ctx.layer} has {want}.",
                hint="Masks are over all tokens of all ranks: use ctx.heads and ctx.layout.size.",
            )
        return old if mask == old else mask

    def _recall(self, ctx: AttentionContext, q: Tensor, k: Tensor, mask: BlockMask) -> float:
        grid, layout = ctx.grid, self.tokens(ctx)
        places = sample(grid.prefix, grid.video, self.rules.recall, ctx.layer + ctx.step)
        kept = kept_mass(q, k, layout, ctx.world, masks=[mask], places=places, scale=ctx.scale)
        return float(kept.mean())

    def summary(self) -> Summary:
        """What has been done since the last `reset`, the same on all ranks.

        What gradient checkpointing computes again counts again.
        """
        return Summary(
            mask=self.name,
            sparse_calls=len(self._densities),
            dense_calls=self._dense,
            density=fmean(self._densities or [1.0]),
            masks=len(self._density),
            renewals=self._renewals,
            recall=fmean(self._recalls) if self._recalls else None,
            least_recall=min(self._recalls, default=None),
        )


def _parts(mask: BlockMask | None) -> dict[str, Any]:
    """Bits as an array: as text they would be too much for the header that a state's text is in."""
    return {} if mask is None else {field.name: getattr(mask, field.name) for field in fields(mask)}


def problem_of(layout: Layout, q: Tensor, k: Tensor) -> Problem:
    """What a planner is asked, of local tensors [B, H, S, D]."""
    return Problem(
        batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3],
        q=layout, kv=layout, dtype=str(q.dtype).removeprefix("torch."),
    )  # fmt: skip


def reordered(layout: Layout, place: IntArray) -> Layout:
    """The same tokens on the same ranks, where token i is called place[i]."""
    orders = [place[layout.order(rank)].tolist() for rank in range(layout.ranks)]
    return Layout.permuted(orders).padded([layout.rows(rank) for rank in range(layout.ranks)])


@dataclass(frozen=True)
class Summary:
    """Sparse attention in a run; means over its sparse calls, recall over those judged."""

    mask: str
    sparse_calls: int
    dense_calls: int
    density: float
    masks: int
    """Different ones."""
    renewals: int
    """How often a layer's mask changed."""
    recall: float | None
    """The share of the softmax of sampled queries that the masks kept."""
    least_recall: float | None
    """Of the worst call."""

    def __str__(self) -> str:
        if not self.sparse_calls:
            return (
                f"{self.mask}: all {self.dense_calls} attentions were dense: few tokens are few blocks, and "
                "first steps are dense unless dense_steps=0"
            )
        kept = "not measured"
        if self.recall is not None:
            kept = f"{self.recall:.1%} of the softmax kept, at least {self.least_recall:.1%} in a call"
        return "\n".join(
            [
                f"{self.mask}: {self.sparse_calls} sparse and {self.dense_calls} dense attentions",
                f"  density    {self.density:.3f}",
                f"  masks      {self.masks}, a layer's mask changed {self.renewals} times",
                f"  recall     {kept}",
            ]
        )
