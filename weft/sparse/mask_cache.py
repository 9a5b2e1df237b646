"""MaskCache: the masks of a transformer's attentions, reused between denoising steps, and their statistics.

    cache = MaskCache("topk:0.2")
    mask = cache.mask(ctx, q, k)                    # in every sharded attention
    print(cache.summary())

All ranks must call it in the same order: some masks need communication.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.core.indices import IntArray
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.masks.grid import TokenGrid
from weft.plan.counts import head_loads
from weft.sparse.context import AttentionContext, SparseAttention
from weft.sparse.methods import FixedMask, MaskSchedule, parse_method
from weft.sparse.pooling import recall, sample_positions

RECALL_INTERVAL = 11  # measure every 11th sparse call: few models have a multiple of 11 layers
NEVER = -(1 << 30)


class CachedMask(NamedTuple):
    """The mask of a layer, the step it was made in, and the last that used it."""

    since: int = NEVER
    last: int = 0
    mask: BlockMask | None = None


def sparse_attention(method: str | BlockMask | SparseAttention) -> SparseAttention:
    """Return the argument sparse= as an object of the protocol; names and plain masks are cached."""
    if isinstance(method, str):
        return MaskCache(method)
    if isinstance(method, BlockMask):
        return MaskCache(FixedMask(method))
    if not callable(getattr(method, "mask", None)):
        raise InputError(
            "sparse must be a name, a BlockMask or an object with mask(ctx, q, k), got a "
            f"{type(method).__name__}.",
            hint='Pass "sta", "svg", "radial" or "topk:0.2", for example.',
        )
    return method if hasattr(method, "finish") else MaskCache(method)


class MaskCache:
    """Masks by a spec (see `weft.sparse.methods`) or by an object with `mask`, for one transformer."""

    def __init__(self, sparse: str | SparseAttention) -> None:
        self.name = sparse if isinstance(sparse, str) else type(sparse).__name__
        self.source, self.schedule = (
            parse_method(sparse) if isinstance(sparse, str) else (sparse, MaskSchedule())
        )
        self.changes: bool = getattr(self.source, "changes", True)
        self._layouts: dict[tuple[TokenGrid, Layout], Layout] = {}
        self._cached: dict[tuple[int, int, Layout], CachedMask] = {}
        self._restored: dict[tuple[int, int, int], CachedMask] = {}
        """By layer, branch and tokens: the key of an attention on any number of ranks."""
        self.reset()

    def reset(self) -> None:
        """Start a run: masks are made anew, and statistics start at zero."""
        self._cached = {key: cached._replace(since=NEVER) for key, cached in self._cached.items()}
        self._restored = {}
        self._dense = self._renewals = 0
        self._densities: list[float] = []
        self._density: dict[str, float] = {}
        self._recalls: list[float] = []

    def state(self, step: int) -> list[PyTree]:
        """Return the masks that a step needs of the ones before, as a `weft.generate.state` can hold them."""
        return [
            [layer, branch, layout.size, cached.since, _fields(cached.mask)]
            for (layer, branch, layout), cached in self._cached.items()
            if cached.since > step - self.schedule.refresh
        ]

    def restore(self, state: Sequence[PyTree]) -> None:
        """Continue from a state, on any number of ranks, after a `reset`."""
        self._restored = {
            (layer, branch, tokens): CachedMask(since, since, BlockMask(**mask) if mask else None)
            for layer, branch, tokens, since, mask in state
        }

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask | None:
        """Return the mask of a call; the same object, not an equal one, as long as nothing changes.

        A second call for a step, as by gradient checkpointing, returns the same and sends nothing.
        """
        mask = None if self.schedule.is_dense(ctx) else self._mask(ctx, q, k)
        if mask is None:
            self._dense += 1
            return None
        if len(self._densities) % RECALL_INTERVAL == 0 and self.schedule.recall:
            self._recalls.append(self._recall(ctx, q, k, mask))
        if mask.digest not in self._density:
            pairs = mask.heads * mask.q_len * mask.kv_len
            self._density[mask.digest] = int(head_loads(mask).sum()) / pairs
        self._densities.append(self._density[mask.digest])
        return mask

    def tokens(self, ctx: AttentionContext) -> Layout:
        """Return the layout, with the tokens in the order that the masks are in."""
        grid, layout = ctx.grid, ctx.layout
        if grid.tokens != layout.size:
            raise InputError(f"{grid} has {grid.tokens} tokens, but the attention has {layout.size}.")
        tile = getattr(self.source, "tile", None)
        if tile is None:
            return layout
        if (grid, layout) not in self._layouts:
            self._layouts[grid, layout] = reordered_layout(layout, grid.voxels(tile).inverse)
        return self._layouts[grid, layout]

    def _mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask | None:
        key = ctx.layer, ctx.branch, ctx.layout
        cached = self._cached.get(key, CachedMask())
        if ctx.step < cached.last or cached.since == NEVER:  # another run
            cached = self._of_more_ranks(ctx) or cached._replace(since=NEVER)
        if not self._is_fresh(cached, ctx.step):
            cached = self._renewed(ctx, q, k, cached)
        self._cached[key] = cached._replace(last=ctx.step)
        return cached.mask

    def _is_fresh(self, cached: CachedMask, step: int) -> bool:
        return cached.since <= step < cached.since + self.schedule.refresh

    def _of_more_ranks(self, ctx: AttentionContext) -> CachedMask | None:
        """Return the mask that all ranks used for an attention that half of them now compute: all have it."""
        matches = (
            cached
            for (layer, branch, layout), cached in self._cached.items()
            if (layer, branch, layout.size) == (ctx.layer, ctx.branch, ctx.layout.size)
            and layout.ranks > ctx.layout.ranks
            and cached.since != NEVER
        )
        return next(matches, None)

    def _renewed(self, ctx: AttentionContext, q: Tensor, k: Tensor, cached: CachedMask) -> CachedMask:
        restored = self._restored.get((ctx.layer, ctx.branch, ctx.layout.size), CachedMask())
        old = cached.mask
        if self._is_fresh(restored, ctx.step):
            since, mask = restored.since, old if restored.mask == old else restored.mask
        else:
            since, mask = ctx.step, self._compute(ctx, q, k, old)
        if old is not None and mask is not old:
            self._renewals += mask is not None and cached.since != NEVER
        return CachedMask(since, ctx.step, mask)

    def _compute(
        self, ctx: AttentionContext, q: Tensor, k: Tensor, old: BlockMask | None
    ) -> BlockMask | None:
        with torch.no_grad():
            mask = self.source.mask(replace(ctx, layout=self.tokens(ctx)), q.detach(), k.detach())
        if mask is None or mask.is_dense:
            return None
        shape, expected = mask.grid[:3], (ctx.heads, ctx.layout.size, ctx.layout.size)
        if shape != expected:
            raise InputError(
                f"{self.name} made a mask for (heads, queries, keys) {shape}; layer {ctx.layer} has "
                f"{expected}.",
                hint="Masks are over all tokens of all ranks: use ctx.heads and ctx.layout.size.",
            )
        return old if mask == old else mask

    def _recall(self, ctx: AttentionContext, q: Tensor, k: Tensor, mask: BlockMask) -> float:
        grid, layout = ctx.grid, self.tokens(ctx)
        positions = sample_positions(grid.prefix, grid.video, self.schedule.recall, ctx.layer + ctx.step)
        shares = recall(q, k, layout, ctx.world, masks=[mask], places=positions, scale=ctx.scale)
        return float(shares.mean())

    def summary(self) -> SparsitySummary:
        """Return the statistics since the last `reset`, the same on all ranks.

        Calls that gradient checkpointing recomputes are counted again.
        """
        return SparsitySummary(
            mask=self.name,
            sparse_calls=len(self._densities),
            dense_calls=self._dense,
            density=fmean(self._densities or [1.0]),
            masks=len(self._density),
            renewals=self._renewals,
            recall=fmean(self._recalls) if self._recalls else None,
            least_recall=min(self._recalls, default=None),
        )


def _fields(mask: BlockMask | None) -> Mapping[str, PyTree]:
    """Bits as an array: as text they would be too large for the header that holds a state's text."""
    return {} if mask is None else {field.name: getattr(mask, field.name) for field in fields(mask)}


def problem_of(layout: Layout, q: Tensor, k: Tensor) -> Problem:
    """Return the problem of a planner, of local tensors [B, H, S, D]."""
    return Problem(
        batch=q.shape[0], heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3],
        q=layout, kv=layout, dtype=str(q.dtype).removeprefix("torch."),
    )  # fmt: skip


def reordered_layout(layout: Layout, place: IntArray) -> Layout:
    """Return the same tokens on the same ranks, where token i is called place[i]."""
    orders = [place[layout.order(rank)].tolist() for rank in range(layout.ranks)]
    return Layout.permuted(orders).padded([layout.rows(rank) for rank in range(layout.ranks)])


@dataclass(frozen=True)
class SparsitySummary:
    """Sparse attention in a run: means over its sparse calls, and of recall over those that were measured."""

    mask: str
    sparse_calls: int
    dense_calls: int
    density: float
    masks: int
    """Different ones."""
    renewals: int
    """How often a layer's mask changed."""
    recall: float | None
    """The share of the softmax of sampled queries that is inside of the masks."""
    least_recall: float | None
    """Of the worst call."""

    def __str__(self) -> str:
        if not self.sparse_calls:
            return (
                f"{self.mask}: all {self.dense_calls} attentions were dense: few tokens are few blocks, and "
                "first steps are dense unless dense_steps=0"
            )
        share = "not measured"
        if self.recall is not None:
            share = f"{self.recall:.1%} of the softmax kept, at least {self.least_recall:.1%} in a call"
        return "\n".join(
            [
                f"{self.mask}: {self.sparse_calls} sparse and {self.dense_calls} dense attentions",
                f"  density    {self.density:.3f}",
                f"  masks      {self.masks}, a layer's mask changed {self.renewals} times",
                f"  recall     {share}",
            ]
        )
