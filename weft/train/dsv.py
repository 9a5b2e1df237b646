"""DSV: attention that is sparse where it pays, in training, by keys that a predictor finds.

    dsv = DSV(part, heads=6, width=192, depth=6, seed=0)
    dsv.prepare(model)                              # before the optimiser is made
    weft.parallelize(model, sparse=dsv)
    for step in …:
        dsv.begin(step)
        …forward and backward of every micro-batch; optimiser.step()
        dsv.step()

What it learns, it learns in the forward of attention modules that are in training mode; no gradient of it
reaches the model. Blocks that are computed again for their gradients get the mask that they had.
"""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import tables
from weft.core.errors import InputError
from weft.core.files import parse_json
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid
from weft.models.context import AttentionContext
from weft.models.scores import sample
from weft.run.exchange import broadcast_json
from weft.run.switch import everyone
from weft.run.world import World
from weft.train import coarse
from weft.train.costs import Costs
from weft.train.cubes import Cubes
from weft.train.dispatcher import Dispatcher
from weft.train.look import Look
from weft.train.predictor import Predictor
from weft.train.profiler import Profile

if TYPE_CHECKING:
    from weft.train.recipe import SparsePart


class Size(NamedTuple):
    """Of an attention, for who measures what it costs."""

    tokens: int
    heads: int
    dim: int
    dtype: torch.dtype
    device: torch.device
    backend: str


class DSV:
    """Sparse attention for `weft.parallelize`, of one model."""

    def __init__(
        self,
        part: SparsePart,
        *,
        heads: int,
        width: int,
        depth: int,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.part, self.width = part, width
        self.dispatcher = Dispatcher(part, layers=depth, heads=heads)
        self.predictors = nn.ModuleList(
            Predictor(part, heads=heads, width=width, seed=seed * depth + layer)
            for layer in range(depth if part.method == "dsv" else 0)
        ).to(device)
        self.optimiser = _adam(self.predictors, part.rate)
        self._cubes: dict[TokenGrid, Cubes] = {}
        self._kept: dict[Any, BlockMask | None] = {}
        """By layer and forward: what blocks that are computed again get, until the step is over."""
        self._losses: dict[int, list[float]] = {}
        self._profiles: dict[int, list[Profile]] = {}
        self._facts: list[dict[str, Any]] = []
        self._seen: tuple[World, Size] | None = None
        self._plans: dict[str, Any] = {}
        """Of a checkpoint, until there is a world to plan by them."""

    def prepare(self, model: nn.Module) -> None:
        """Add what belongs to the model, before it has an optimiser."""
        if self.part.coarse:
            coarse.add_gates(model, self.width)

    def begin(self, step: int) -> None:
        self._kept = {}
        self.dispatcher.begin(step)

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask | None:
        """None is dense. A forward is learned from, profiled and selected for once."""
        self._check_sizes(ctx, q)
        if ctx.grid not in self._cubes:
            self._cubes[ctx.grid] = Cubes(ctx.grid, self.part.cube, self.part.block_k)
        if self._plans:
            ctx.world.planner.resumed |= {key: (np.array(s), name) for key, (s, name) in self._plans.items()}
            self._plans = {}
        key = ctx.layer, ctx.run, ctx.layout
        if key in self._kept:
            return self._kept[key]
        training = ctx.module is None or ctx.module.training
        q, k = q.detach(), k.detach()
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            mask = self._looked_at(ctx, self._cubes[ctx.grid], q, k, training=training)
        if training:
            self._kept[key] = mask
            self._seen = ctx.world, Size(
                ctx.layout.size, ctx.heads, q.shape[3], q.dtype, q.device, ctx.backend
            )  # fmt: skip
        return mask

    def _check_sizes(self, ctx: AttentionContext, q: Tensor) -> None:
        """Refuse a model of other sizes than the predictors were made for."""
        heads, depth = self.dispatcher.heads, len(self.dispatcher.blocks)
        width = self.width if not self.predictors and not self.part.coarse else ctx.heads * q.shape[3]
        if self.part.source == "hidden" and self.predictors and ctx.hidden is not None:
            width = ctx.hidden.shape[-1]
        if (heads, self.width, depth) != (ctx.heads, width, ctx.layers):
            raise InputError(
                f"This DSV is for heads={heads}, width={self.width}, depth={depth}; {ctx.name} has "
                f"{ctx.heads} heads of {q.shape[3]} and is one of {ctx.layers} attention modules.",
                hint=f"Make it DSV(…, heads={ctx.heads}, width={width}, depth={ctx.layers}).",
            )

    def tokens(self, ctx: AttentionContext) -> Layout:
        return self._cubes[ctx.grid].layout(ctx.layout)

    def loads(self, ctx: AttentionContext) -> Any:
        """The budgets of the heads, which all ranks know."""
        return self.dispatcher.budgets(ctx.layer)

    def finish(self, ctx: AttentionContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """With what the means of the cubes that were left out add, if there are gates for it."""
        if not self.part.coarse:
            return out
        return out + coarse.gated(ctx, self.tokens(ctx), self._cubes[ctx.grid].block, q, k, v)

    def _looked_at(
        self, ctx: AttentionContext, cubes: Cubes, q: Tensor, k: Tensor, *, training: bool
    ) -> BlockMask | None:
        layer, now = ctx.layer, self.dispatcher
        budgets = now.budgets(layer)
        learns = training and bool(self.predictors) and now.learns(layer)
        profiles = training and layer not in now.never and now.profiles(layer)
        if not learns and not profiles and budgets is None:
            return None
        predictor: Any = self.predictors[layer] if self.predictors else None
        places = sample(0, cubes.video, self.part.rows, layer + 31 * now.step)
        look = Look(self.part, predictor, ctx, cubes, places, q=q, k=k)
        if learns:
            self._losses.setdefault(layer, []).append(look.learn())
        if profiles:
            self._profiles.setdefault(layer, []).append(look.profile(budgets))
        # Where annealing begins, all heads have all keys.
        return None if budgets is None or budgets.min() >= 1 else look.select(budgets)

    def step(self) -> None:
        """After the model's own, on all ranks: predictors learn, and what was profiled is told."""
        self._kept = {}
        if self._seen is None:
            return
        world, size = self._seen
        if self.optimiser is not None:
            self._reduce(world)
            self.optimiser.step()
            self.optimiser.zero_grad()
        self._observe()
        known = self.dispatcher.costs
        if self.part.gate == "cost" and (known is None or known.ranks != world.comm.size):
            costs = asdict(Costs.measure(*size, part=self.part, world=world))
            self.dispatcher.costs = Costs(**broadcast_json(costs))  # all ranks must decide alike
        self._losses, self._profiles = {}, {}

    def _reduce(self, world: World) -> None:
        """Gradients: sums over ranks that share a sequence, means over others and over micro-batches."""
        grads = [
            weight.grad.div_(len(losses))
            for layer, losses in sorted(self._losses.items())
            for weight in self.predictors[layer].parameters()
            if weight.grad is not None
        ]
        if world.comm.size == 1 and not dist.is_initialized() or not grads:
            return
        flat = torch.cat([grad.flatten() for grad in grads])
        if dist.is_initialized():
            dist.all_reduce(flat)
            flat *= world.comm.size / dist.get_world_size()
        else:
            flat = everyone(flat, mesh=world, stage="predictor").sum(0)
        for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))

    def _observe(self) -> None:
        """Means over micro-batches, and over ranks with other clips."""
        self._facts = []
        for layer, found in sorted(self._profiles.items()):
            means = {
                field.name: np.mean([getattr(each, field.name) for each in found], axis=0)
                for field in fields(Profile)
            }
            if self.predictors:
                means["predictor"] = np.asarray(fmean(self._losses[layer]))
            else:
                del means["keys"]
            told = _over_all(means)
            self.dispatcher.observe(layer, told["needed"], float(told["coverage"]))
            plain = {name: value.tolist() for name, value in told.items()}
            self._facts.append({**self.dispatcher.facts(layer), **plain})
        if self._facts:  # else a log would not know how much of all attention is computed
            self._facts += [self.dispatcher.facts(layer) for layer in sorted(self.dispatcher.never)]

    def facts(self) -> list[dict[str, Any]]:
        """What the last step found out, by layer, for a journal."""
        return self._facts

    def state_dict(self) -> dict[str, Any]:
        """Tensors as they are, to be loaded in place, and the rest as text."""
        plans = self._plans if self._seen is None else self._seen[0].planner.state()
        rest = {"dispatcher": self.dispatcher.state_dict(), "plans": plans}
        return {"predictors": self.predictors.state_dict(), **self._moments(), "rest": json.dumps(rest)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.predictors.load_state_dict(state["predictors"])
        for name, moment in self._moments().items():
            for at, value in moment.items():
                value.copy_(state[name][at])
        rest = parse_json(state["rest"], "Its rest")
        self.dispatcher.load_state_dict(rest["dispatcher"])
        self._plans = _checked_plans(rest["plans"], self.dispatcher.heads)

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        if self.optimiser is None:
            return {}
        return {
            each: {
                name: self.optimiser.state[weight][each]
                for name, weight in self.predictors.named_parameters()
            }
            for each in ("step", "exp_avg", "exp_avg_sq")
        }


def _checked_plans(given: dict[str, Any], heads: int) -> dict[str, Any]:
    """Check what a file says that anybody may have written."""
    kind = tuple[tuple[float, ...], str]
    plans = {key: tables.entry(kind, each, "The plans", key) for key, each in given.items()}
    if any(len(shares) % heads for shares, _ in plans.values()):
        raise InputError(f"The plans are not of {heads} heads.")
    return plans


def _adam(predictors: nn.ModuleList, rate: float) -> torch.optim.Optimizer | None:
    """With its moments there from the start, for checkpoints to be loaded into."""
    if not predictors:
        return None
    made = torch.optim.AdamW(predictors.parameters(), lr=rate, weight_decay=0.0)
    for weight in predictors.parameters():
        weight.grad = torch.zeros_like(weight)
    made.step()
    for state in made.state.values():
        state["step"].zero_()
    made.zero_grad()
    return made


def _over_all(means: dict[str, Any]) -> dict[str, Any]:
    """Means over all ranks; those that share a sequence have the same."""
    if not dist.is_initialized():
        return means
    flat = torch.from_numpy(np.concatenate([value.ravel() for value in means.values()]))
    dist.all_reduce(flat)
    parts = (flat / dist.get_world_size()).split([value.size for value in means.values()])
    return {
        name: part.numpy().reshape(value.shape)
        for part, (name, value) in zip(parts, means.items(), strict=True)
    }
