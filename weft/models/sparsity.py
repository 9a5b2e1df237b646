"""Sparsity: the masks of a pipeline's attentions by layer and step, plans that fit, and an account of both.

    sparsity = Sparsity("topk:0.2")
    sparsity.attend(where, q, k, v)                 # in every sharded attention
    print(sparsity.summary())

All ranks must ask in the same order: some masks are made together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.indices import IntArray
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.models.kept import NOTHING, Kept, Place, restored, stored
from weft.models.methods import Rules, parse
from weft.models.producers import Method, Producer, Where
from weft.models.scores import kept_mass, sample
from weft.plan import strategies
from weft.plan.balance import ratio
from weft.plan.balanced import Balancer
from weft.plan.choose import Plan, choose
from weft.plan.counts import head_loads
from weft.plan.strategy import Strategy
from weft.run.attention import let_go
from weft.run.gpus import topology_for
from weft.schedule.measure import measure

EVERY = 11  # one sparse call in so many is judged; few models have a multiple of it as layers


class Kind(NamedTuple):
    """Attentions of one size: their strategy is chosen once, and only balanced anew for a new mask.

    Choosing takes ten times as long, and what is best for one mask of a method is for the others.
    """

    problem: Problem
    strategy: Strategy | None
    chosen_for: str

    def plan(self, mask: BlockMask) -> str:
        assert self.strategy is not None
        if self.strategy.balance == "none" and mask.digest != self.chosen_for:
            # The first had nothing to balance, or too little.
            return str(replace(self.strategy, balance="balanced"))
        return str(self.strategy)


class Judged(NamedTuple):
    """What one call showed: max / mean of the ranks' work, split evenly and as planned, and its recall."""

    before: float
    after: float
    recall: float | None


def method_of(mask: Any, *, plan: str | Plan | Schedule = "auto") -> Method:
    """What was given for a mask, as what answers attentions."""
    return mask if callable(getattr(mask, "attend", None)) else Sparsity(mask, plan=plan)


class Sparsity:
    """Masks by a spec (see `models.methods`) or a producer, for one transformer."""

    def __init__(self, mask: str | Producer, *, plan: str | Plan | Schedule = "auto") -> None:
        if not isinstance(mask, str) and not callable(getattr(mask, "mask_for", None)):
            raise InputError(
                f"mask is a {type(mask).__name__}.",
                hint='Give "sta", "svg", "radial", "topk:0.2" or an object with mask_for(where, q, k).',
            )
        self.name = mask if isinstance(mask, str) else type(mask).__name__
        self.producer, self.rules = parse(mask) if isinstance(mask, str) else (mask, Rules())
        self.plan = plan
        self._kinds: dict[Any, Kind] = {}
        self._layouts: dict[Any, Layout] = {}
        self._kept: dict[tuple[int, int, Layout], Kept] = {}
        self._before: dict[Place, Kept] = {}
        self.reset()

    def reset(self) -> None:
        """A new run: masks are made anew, and so is the account. Strategies stay."""
        self._kept = {place: kept._replace(since=NOTHING.since) for place, kept in self._kept.items()}
        self._before = {}
        self._dense = self._replans = 0
        self._densities: list[float] = []
        self._density: dict[str, float] = {}
        self._judged: list[Judged] = []

    def state(self, step: int) -> list[Any]:
        """The masks that a step needs of the ones before."""
        return stored(self._kept, step - self.rules.refresh + 1)

    def go_on(self, state: list[Any]) -> None:
        """From that state, here or on other ranks, after a `reset`."""
        self._before = restored(state)

    def attend(self, where: Where, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return where.attention(q, k, v, **self.options(where, q, k))

    def options(self, where: Where, q: Tensor, k: Tensor) -> dict[str, Any]:
        """What `weft.attention` is to be called with besides the tensors: mask, tokens and plan."""
        mask = self.mask_for(where, q, k)
        if mask is None:
            self._dense += 1
            return {"mask": None, "tokens": where.layout, "plan": self.plan}
        there = self._ordered(where)
        key = where.grid, where.layout, q.shape, k.shape[1], q.dtype
        if key not in self._kinds:
            self._kinds[key] = self._kind(there.layout, q, k, mask)
        kind = self._kinds[key]
        plan = self.plan if kind.strategy is None else kind.plan(mask)
        if len(self._densities) % EVERY == 0:
            recall = self._recall(there, q, k, mask) if self.rules.recall else None
            self._judged.append(Judged(*imbalance(kind.problem, mask, plan), recall))
        if mask.digest not in self._density:
            pairs = mask.heads * mask.q_len * mask.kv_len
            self._density[mask.digest] = int(head_loads(mask).sum()) / pairs
        self._densities.append(self._density[mask.digest])
        return {"mask": mask, "tokens": there.layout, "plan": plan}

    def mask_for(self, where: Where, q: Tensor, k: Tensor) -> BlockMask | None:
        """The mask of a call; the same one, not an equal one, as long as nothing changes.

        Asked again for a step, as by gradient checkpointing, it answers the same and nothing is sent.
        """
        if self.rules.is_dense(where):
            return None
        place = where.layer, where.branch, where.layout
        kept = self._kept.get(place, NOTHING)
        if where.step < kept.last or kept.since == NOTHING.since:  # another run
            kept = self._of_more_ranks(where) or kept._replace(since=NOTHING.since)
        if not kept.since <= where.step < kept.since + self.rules.refresh:
            kept = self._renewed(where, q, k, kept)
        self._kept[place] = kept._replace(last=where.step)
        return kept.mask

    def _of_more_ranks(self, where: Where) -> Kept | None:
        """What was kept when all ranks computed what now some of them do: they all know it, and keep it."""
        found = (
            kept
            for (layer, branch, layout), kept in self._kept.items()
            if (layer, branch, layout.size) == (where.layer, where.branch, where.layout.size)
            and layout.ranks > where.layout.ranks
            and kept.since != NOTHING.since
        )
        return next(found, None)

    def _renewed(self, where: Where, q: Tensor, k: Tensor, kept: Kept) -> Kept:
        before, old = self._before.get((where.layer, where.branch, where.layout.size), NOTHING), kept.mask
        if before.since <= where.step < before.since + self.rules.refresh:
            since, mask = before.since, old if before.mask == old else before.mask
        else:
            since, mask = where.step, self._ask(where, q, k, old)
        if old is not None and mask is not old:
            self._replans += mask is not None and kept.since != NOTHING.since
            if sum(other.mask == old for other in self._kept.values()) == 1:
                let_go(where.world, old)  # thousands of them would fill the memory
        return Kept(since, where.step, mask)

    def _ask(self, where: Where, q: Tensor, k: Tensor, old: BlockMask | None) -> BlockMask | None:
        with torch.no_grad():
            mask = self.producer.mask_for(self._ordered(where), q.detach(), k.detach())
        if mask is None or mask.is_dense:
            return None
        have, want = mask.grid[:3], (where.heads, where.layout.size, where.layout.size)
        if have != want:
            raise InputError(
                f"{self.name} made a mask for (heads, queries, keys) {have}; layer {where.layer} has {want}.",
                hint="Masks are over all tokens of all ranks: use where.heads and where.layout.size.",
            )
        return old if mask == old else mask

    def _ordered(self, where: Where) -> Where:
        """With the tokens in the order that the producer's masks are in."""
        grid, layout = where.grid, where.layout
        if grid.tokens != layout.size:
            raise InputError(f"{grid} has {grid.tokens} tokens, the attention {layout.size}.")
        tile = getattr(self.producer, "tile", None)
        if tile is None:
            return where
        if (grid, layout) not in self._layouts:
            self._layouts[grid, layout] = reordered(layout, grid.voxels(tile).inverse)
        return replace(where, layout=self._layouts[grid, layout])

    def _kind(self, layout: Layout, q: Tensor, k: Tensor, mask: BlockMask) -> Kind:
        problem = problem_of(layout, q, k)
        if self.plan != "auto":
            return Kind(problem, None, mask.digest)
        found = choose(problem, mask, topology_for(None, problem.ranks, q.device))
        return Kind(problem, found.ranked[0].strategy, mask.digest)

    def _recall(self, where: Where, q: Tensor, k: Tensor, mask: BlockMask) -> float:
        grid = where.grid
        places = sample(grid.prefix, grid.video, self.rules.recall, where.layer + where.step)
        kept = kept_mass(q, k, where.layout, where.world, masks=[mask], places=places, scale=where.scale)
        return float(kept.mean())

    def summary(self) -> Summary:
        """What has been done since the last `reset`, the same on all ranks.

        What gradient checkpointing computes again counts again.
        """
        recalls = [call.recall for call in self._judged if call.recall is not None]
        return Summary(
            mask=self.name,
            sparse_calls=len(self._densities),
            dense_calls=self._dense,
            density=fmean(self._densities or [1.0]),
            imbalance_before=fmean([call.before for call in self._judged] or [1.0]),
            imbalance_after=fmean([call.after for call in self._judged] or [1.0]),
            plans=len(self._density),
            replans=self._replans,
            recall=fmean(recalls) if recalls else None,
            least_recall=min(recalls, default=None),
        )


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


def imbalance(problem: Problem, mask: BlockMask, plan: str | Plan | Schedule) -> tuple[float, float]:
    """max / mean of the ranks' work: of an even split of heads and tokens on the plan's mesh, of the plan."""
    if not isinstance(plan, str):
        work = measure(plan.schedule if isinstance(plan, Plan) else plan).imbalance
        return work, work
    strategy = strategies.parse(plan, problem.ranks)
    balancer = Balancer(problem, mask, topology_for(None, problem.ranks))
    ways = (replace(strategy, balance="none"), strategy)
    before, after = (ratio(balancer.assign(way).seconds.sum(axis=2)) for way in ways)
    return before, after


@dataclass(frozen=True)
class Summary:
    """Sparse attention in a run; means over its sparse calls, imbalance and recall over those judged."""

    mask: str
    sparse_calls: int
    dense_calls: int
    density: float
    imbalance_before: float
    """Of the ranks' work if heads and tokens were split evenly; `imbalance_after` is that of the plans."""
    imbalance_after: float
    plans: int
    """Different masks, each with a plan."""
    replans: int
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
                f"  imbalance  {self.imbalance_before:.3f} split evenly, {self.imbalance_after:.3f} planned",
                f"  plans      {self.plans}, a layer's mask changed {self.replans} times",
                f"  recall     {kept}",
            ]
        )
