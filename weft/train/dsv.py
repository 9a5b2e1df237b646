"""DSV: attention that becomes sparse in training where it pays, with keys selected by a learned predictor.

    dsv = DSV(config, heads=6, width=192, depth=6, seed=0)
    dsv.prepare(model)                              # before the optimizer is made
    weft.parallelize(model, sparse=dsv)
    for step in …:
        dsv.begin(step)
        …forward and backward of every micro-batch; optimizer.step()
        dsv.step()

It is trained in the forward of attention modules in training mode; none of its gradients reaches the model.
Blocks that are recomputed for their gradients reuse their masks.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from weft.core import tables
from weft.core.errors import InputError
from weft.core.files import parse_json
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.masks.grid import TokenGrid
from weft.run.exchange import broadcast_json
from weft.run.switch import all_gather
from weft.run.world import World
from weft.sparse.context import AttentionContext
from weft.sparse.pooling import sample_positions
from weft.train import coarse
from weft.train.attention_cost import AttentionCost
from weft.train.attention_stats import AttentionStats, Profile
from weft.train.cubes import Cubes, Shares
from weft.train.dispatcher import Dispatcher
from weft.train.mesh import all_reduce_flat
from weft.train.predictor import Predictor

if TYPE_CHECKING:
    from weft.train.recipe import SparseConfig


@dataclass(frozen=True)
class DSVState:
    """What is stored beside tensors, as JSON that may be forged."""

    dispatcher: dict[str, Any]
    plans: dict[str, Any]


class DSV:
    """Sparse attention of one model, for `weft.parallelize`."""

    def __init__(
        self,
        config: SparseConfig,
        *,
        heads: int,
        width: int,
        depth: int,
        seed: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.config, self.width = config, width
        self.dispatcher = Dispatcher(config, layers=depth, heads=heads)
        self.predictors = nn.ModuleList(
            Predictor(config, heads=heads, width=width, seed=seed * depth + layer)
            for layer in range(depth if config.method == "dsv" else 0)
        ).to(device)
        self.optimizer = _adamw(self.predictors, config.lr)
        self.records: list[dict[str, Any]] = []
        """Profiles and decisions of the last step, by layer, for a journal."""
        self._cubes: dict[TokenGrid, Cubes] = {}
        self._masks: dict[tuple[int, int, Layout], BlockMask | None] = {}
        """By layer, forward and layout, for recomputed blocks; until the end of the step."""
        self._losses: dict[int, list[float]] = {}
        self._profiles: dict[int, list[Profile]] = {}
        self._last_call: tuple[World, Callable[[], AttentionCost]] | None = None
        """The world of the last forward in training, and how to measure the cost of its attention."""
        self._plans: dict[str, Any] = {}
        """Plans of a checkpoint, until there is a planner."""

    def prepare(self, model: nn.Module) -> None:
        """Add the model's own weights, before it has an optimizer."""
        if self.config.coarse:
            coarse.add_gates(model, self.width)

    def begin(self, step: int) -> None:
        self._masks = {}
        self.dispatcher.begin(step)

    def mask(self, ctx: AttentionContext, q: Tensor, k: Tensor) -> BlockMask | None:
        """Learn from, profile and select for a forward, once; None is dense."""
        self._check_sizes(ctx, q)
        if ctx.grid not in self._cubes:
            self._cubes[ctx.grid] = Cubes(ctx.grid, self.config.cube, self.config.block_k)
        if self._plans:
            ctx.world.planner.resumed |= {key: (np.array(s), name) for key, (s, name) in self._plans.items()}
            self._plans = {}
        key = ctx.layer, ctx.run, ctx.layout
        if key in self._masks:
            return self._masks[key]
        training = ctx.module is None or ctx.module.training
        q, k = q.detach(), k.detach()
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            mask = self._compute_mask(ctx, self._cubes[ctx.grid], q, k, training=training)
        if training:
            self._masks[key] = mask
            self._last_call = ctx.world, partial(
                AttentionCost.measure, ctx.layout.size, ctx.heads, q.shape[3], q.dtype, q.device,
                ctx.backend, config=self.config, world=ctx.world,
            )  # fmt: skip
        return mask

    def _check_sizes(self, ctx: AttentionContext, q: Tensor) -> None:
        """Refuse a model of other sizes than the predictors were made for."""
        heads, depth = self.dispatcher.heads, len(self.dispatcher.blocks)
        width = self.width if not self.predictors and not self.config.coarse else ctx.heads * q.shape[3]
        if self.config.source == "hidden" and self.predictors and ctx.hidden is not None:
            width = ctx.hidden.shape[-1]
        if (heads, self.width, depth) != (ctx.heads, width, ctx.layers):
            raise InputError(
                f"This DSV is for heads={heads}, width={self.width}, depth={depth}; {ctx.name} has "
                f"{ctx.heads} heads of {q.shape[3]} and is one of {ctx.layers} attention modules.",
                hint=f"Make it DSV(…, heads={ctx.heads}, width={width}, depth={ctx.layers}).",
            )

    def tokens(self, ctx: AttentionContext) -> Layout:
        return self._cubes[ctx.grid].layout(ctx.layout)

    def loads(self, ctx: AttentionContext) -> Shares | None:
        """Return the budgets of the heads, which all ranks know."""
        return self.dispatcher.budgets(ctx.layer)

    def finish(self, ctx: AttentionContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
        """Add the coarse branch, if there is one."""
        if not self.config.coarse:
            return out
        return out + coarse.gated(ctx, self.tokens(ctx), self._cubes[ctx.grid].block, q, k, v)

    def _compute_mask(
        self, ctx: AttentionContext, cubes: Cubes, q: Tensor, k: Tensor, *, training: bool
    ) -> BlockMask | None:
        layer, dispatcher = ctx.layer, self.dispatcher
        budgets = dispatcher.budgets(layer)
        learns = training and bool(self.predictors) and dispatcher.learns(layer)
        profiles = training and layer not in dispatcher.always_dense and dispatcher.profiles(layer)
        if not learns and not profiles and budgets is None:
            return None
        predictor: Any = self.predictors[layer] if self.predictors else None
        places = sample_positions(0, cubes.video, self.config.rows, layer + 31 * dispatcher.step)
        stats = AttentionStats(self.config, predictor, ctx, cubes, places, q=q, k=k)
        if learns:
            self._losses.setdefault(layer, []).append(stats.learn())
        if profiles:
            self._profiles.setdefault(layer, []).append(stats.profile(budgets))
        # When annealing begins, all heads use all keys: dense.
        return None if budgets is None or budgets.min() >= 1 else stats.select(budgets)

    def step(self) -> None:
        """Update predictors and observations, after the model's optimizer, on all ranks."""
        self._masks = {}
        if self._last_call is None:
            return
        world, measure_cost = self._last_call
        if self.optimizer is not None:
            self._average_gradients(world)
            self.optimizer.step()
            self.optimizer.zero_grad()
        self._observe()
        costs = self.dispatcher.costs
        if self.config.gate == "cost" and (costs is None or costs.ranks != world.comm.size):
            # All ranks must decide alike.
            self.dispatcher.costs = AttentionCost(**broadcast_json(asdict(measure_cost())))
        self._losses, self._profiles = {}, {}

    def _average_gradients(self, world: World) -> None:
        """Sum over ranks that share a sequence; average over the others and over micro-batches."""
        grads = [
            weight.grad.div_(len(losses))
            for layer, losses in sorted(self._losses.items())
            for weight in self.predictors[layer].parameters()
            if weight.grad is not None
        ]
        if grads and dist.is_initialized():
            all_reduce_flat(grads, dist.get_world_size() / world.comm.size)
        elif grads and world.comm.size > 1:
            flat = all_gather(torch.cat([grad.flatten() for grad in grads]), mesh=world, stage="predictor")
            for grad, total in zip(grads, flat.sum(0).split([x.numel() for x in grads]), strict=True):
                grad.copy_(total.view_as(grad))

    def _observe(self) -> None:
        """Average profiles over micro-batches and over ranks with other clips."""
        self.records = []
        for layer, profiles in sorted(self._profiles.items()):
            means = {
                field.name: np.mean([getattr(each, field.name) for each in profiles], axis=0)
                for field in fields(Profile)
            }
            if self.predictors:
                means["predictor"] = np.asarray(fmean(self._losses[layer]))
            else:
                del means["keys"]
            means = _mean_over_ranks(means)
            self.dispatcher.observe(layer, means["needed"], float(means["coverage"]))
            plain = {name: value.tolist() for name, value in means.items()}
            self.records.append({**self.dispatcher.record(layer), **plain})
        if self.records:  # with blocks that stay dense, for the density of the whole model
            dense = sorted(self.dispatcher.always_dense)
            self.records += [self.dispatcher.record(layer) for layer in dense]

    def state_dict(self) -> dict[str, Any]:
        """Return tensors, to be loaded in place, and the rest as text."""
        plans = self._plans if self._last_call is None else self._last_call[0].planner.state()
        rest = json.dumps(asdict(DSVState(self.dispatcher.state_dict(), plans)))
        return {"predictors": self.predictors.state_dict(), **self._moments(), "rest": rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.predictors.load_state_dict(state["predictors"])
        for name, moments in self._moments().items():
            for weight, moment in moments.items():
                moment.copy_(state[name][weight])
        source = "The state of [sparse]"
        rest = tables.read(DSVState, parse_json(state["rest"], source), source)
        self.dispatcher.load_state_dict(rest.dispatcher)
        self._plans = _checked_plans(rest.plans, self.dispatcher.heads)

    def _moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state by its name and the weight's."""
        if self.optimizer is None:
            return {}
        state = self.optimizer.state
        weights = dict(self.predictors.named_parameters())
        return {
            moment: {name: state[weight][moment] for name, weight in weights.items()}
            for moment in ("step", "exp_avg", "exp_avg_sq")
        }


def _checked_plans(table: dict[str, Any], heads: int) -> dict[str, Any]:
    """Check the types of plans from a file that may be forged."""
    plan_type = tuple[tuple[float, ...], str]
    plans = {key: tables.entry(plan_type, plan, "The plans", key) for key, plan in table.items()}
    if any(len(shares) % heads for shares, _ in plans.values()):
        raise InputError(f"The plans must have {heads} heads.")
    return plans


def _adamw(predictors: nn.ModuleList, lr: float) -> torch.optim.Optimizer | None:
    """Return an optimizer that has its moments from the start, so that checkpoints can be loaded in place."""
    if not predictors:
        return None
    optimizer = torch.optim.AdamW(predictors.parameters(), lr=lr, weight_decay=0.0)
    for weight in predictors.parameters():
        moments = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[weight] = {"step": torch.tensor(0.0), **moments}
    return optimizer


def _mean_over_ranks(means: dict[str, npt.NDArray[np.float64]]) -> dict[str, npt.NDArray[np.float64]]:
    """Average over all ranks; those that share a sequence have equal values."""
    if not dist.is_initialized():
        return means
    tensors = {name: torch.from_numpy(np.array(value)) for name, value in means.items()}
    all_reduce_flat([*tensors.values()], dist.get_world_size())
    return {name: tensor.numpy() for name, tensor in tensors.items()}
