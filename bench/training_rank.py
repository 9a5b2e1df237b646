"""What a rank of `bench.training` does: whole training steps of a VideoDiT, by each contender in its turn."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from bench.rows import Took, take_turns
from weft.core.layout import Layout
from weft.diffusers import attention_hook
from weft.diffusers.parallelize import parallelize
from weft.run.switch import switch
from weft.sparse.context import AttentionContext
from weft.train.attention_cost import AttentionCost
from weft.train.attention_stats import AttentionStats
from weft.train.dispatcher import Dispatcher
from weft.train.dsv import DSV
from weft.train.optimizer import adamw
from weft.train.recipe import SparseConfig, TrainConfig
from weft.video import flow
from weft.video.transformer import DiTConfig, VideoDiT

TORCH, ULYSSES, WEFT, REST = "torch SDPA", "Ulysses on torch SDPA", "weft, dense", "no attention"
FORCED, TRAINED, REFUSED = "DSV at 0.1", "DSV as trained", "DSV, nothing sparse"
LOOKING = ": selection and predictor"
SPARSE = {
    FORCED: SparseConfig(budget=0.1, stage1=0),
    **dict.fromkeys((TRAINED, REFUSED), SparseConfig(stage1=0)),
}
NEEDED = (
    (0.86, 0.85, 0.84, 0.81),
    (0.84, 0.80, 0.77, 0.76),
    (0.78, 0.76, 0.74, 0.71),
    (0.80, 0.77, 0.72, 0.68),
)
"""The shares of blocks of keys that heads need, by layer: models of `bench.quality` (dsv, 2,000 steps, second
half, means over three seeds, heads of a layer sorted)."""


@dataclass(frozen=True)
class TrainingCase:
    """A model and a clip. As many tokens for its width as a model 12 times as wide has at 200,000."""

    tokens: int
    ranks: int
    depth: int = 2
    heads: int = 4
    dim: int = 64

    def __str__(self) -> str:
        return f"{self.tokens // 1024}k tokens, {'1 process' if self.ranks == 1 else f'{self.ranks} ranks'}"

    @property
    def config(self) -> DiTConfig:
        video = {4096: (16, 32, 32), 8192: (32, 32, 32), 16384: (16, 64, 64)}[self.tokens]
        width = self.heads * self.dim
        return DiTConfig(
            words=16, length=8, video=video, patch=(1, 2, 2), width=width, depth=self.depth, heads=self.heads
        )

    def needed(self, name: str) -> list[list[float]]:
        """What heads need; of a trained model, so many layers from its first to its last, or the last."""
        if name == REFUSED:
            return [[1.0] * self.heads] * self.depth
        layers = np.linspace(len(NEEDED) - 1, 0, self.depth).round().astype(int)[::-1]
        return [np.resize(NEEDED[layer], self.heads).tolist() for layer in layers]


def without(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """No attention: what is left is the rest of the step."""
    return v + 0 * (q + k)


def ulysses(q: Tensor, k: Tensor, v: Tensor, *, tokens: Layout, mesh: Any, **_: Any) -> Tensor:
    """All tokens of some heads by torch's attention, and back; in which order tokens are does not matter."""
    dims = {"batch": q.shape[0], "head": q.shape[1], "token": tokens.size, "dim": q.shape[3]}
    q, k, v = (switch(x, "token", "head", dims=dims, mesh=mesh) for x in (q, k, v))
    return switch(F.scaled_dot_product_attention(q, k, v), "head", "token", dims=dims, mesh=mesh)


INSTEAD = {REST: without, ULYSSES: ulysses}
"""What is called in place of weft's attention."""


class NeverSparse:
    """Dense attention everywhere; with it attentions of one process are seen too."""

    def mask(self, *_: Any) -> None:
        return None

    def finish(self, ctx: AttentionContext, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:  # noqa: ARG002 - the protocol's
        return out


class Told(Dispatcher):
    """Profiles are made, and paid for; what they find in random weights is replaced."""

    needs: list[list[float]]

    def observe(self, layer: int, needed: Any, coverage: float) -> None:  # noqa: ARG002 - a Dispatcher's
        super().observe(layer, self.needs[layer], 1.0)


class TrainingStep:
    """A model with its optimisers; a call is one training step."""

    def __init__(self, name: str, case: TrainingCase) -> None:
        torch.manual_seed(0)
        config = case.config
        self.model, self.sparse = VideoDiT(config), None
        for layer in (self.model.modulate, self.model.head):  # from 0 on, nothing of attention would count
            nn.init.normal_(layer.weight, std=0.02)
        self.attention = INSTEAD.get(name, attention_hook.attention)
        sparse: Any = NeverSparse() if name in INSTEAD else None
        if name in SPARSE:
            sparse = self.sparse = _dsv(name, case)
        if sparse is not None or case.ranks > 1:
            parallelize(self.model, sparse=sparse, plan="ulysses" if name == WEFT else "auto", cfg="off")
        self.optimiser = adamw(self.model.parameters(), TrainConfig())
        self.words = torch.ones(1, config.length, dtype=torch.long)
        frames, height, width = config.video
        self.video = torch.randn(1, frames, config.channels, height, width)
        self.number = 0
        # A small one first: the optimiser gets its memory, and we see whether dense ones agree.
        small = self.video[:, :, :, : height // 4, : width // 4]
        self.first = self.train(small) if self.sparse is None else float("nan")

    def __call__(self) -> float:
        self.number += 1
        return self.train(self.video)

    def train(self, video: Tensor) -> float:
        if self.sparse is not None:
            self.sparse.begin(self.number)
        random = torch.Generator().manual_seed(self.number)
        with patch.object(attention_hook, "attention", self.attention):
            batch = flow.add_noise(video, self.words, generator=random)
            loss = flow.weighted_loss(self.model, batch, video).mean()
        loss.backward()
        _average([p.grad for p in self.model.parameters() if p.grad is not None])
        clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        if self.sparse is not None:
            self.sparse.step()
        return loss.item()


def _dsv(name: str, case: TrainingCase) -> DSV:
    """In stage 2: predictors, whatever they have learned, select."""
    sparse, config = SPARSE[name], case.config
    dsv = DSV(sparse, heads=config.heads, width=config.width, depth=config.depth)
    if name != FORCED:
        dsv.dispatcher = Told(sparse, layers=case.depth, heads=case.heads)
        dsv.dispatcher.needs = case.needed(name)
        for layer in range(case.depth):
            dsv.dispatcher.observe(layer, [], 1.0)
    dsv.dispatcher.costs = AttentionCost.measure(
        case.tokens + config.length, case.heads, case.dim, config=sparse
    )
    return dsv


def _average(grads: list[Tensor]) -> None:
    if not dist.is_initialized():
        return
    flat = torch.cat([grad.flatten() for grad in grads])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(mean.view_as(grad))


_stage: dict[str, TrainingStep] = {}
_spent: defaultdict[str, Took] = defaultdict(lambda: Took(0.0, 0.0))
"""DSV's own work, by what it is."""


def prepare(case: TrainingCase, names: tuple[str, ...]) -> dict[str, Any]:
    """Build contenders, and let the sparse ones take a step: density and seconds of profiling of each."""
    _clock(DSV, "_compute_mask", "looking")
    _clock(DSV, "step", "looking")
    _clock(AttentionStats, "profile", "profiling")
    _stage.clear()
    models: dict[str, Any] = {}
    for name in names:
        _stage[name] = step = TrainingStep(name, case)
        if step.sparse is None:
            dense = _stage[names[0]].first
            assert name == REST or abs(step.first - dense) < 1e-4 * dense, (
                f"{name}: {step.first}, not {dense}"
            )
            continue
        step.number = step.sparse.config.profile_rarely - 1
        _spent.clear()
        step()
        now = step.sparse.dispatcher
        shares = [now.budgets(layer) for layer in range(case.depth)]
        density = float(np.mean([1.0 if share is None else share.mean() for share in shares]))
        models[name] = density, _spent["profiling"].wall / step.sparse.config.profile_rarely
    return models


def _clock(owner: type, name: str, what: str) -> None:
    plain: Callable[..., Any] = getattr(owner, name)
    if hasattr(plain, "clocked"):
        return

    def clocked(*args: Any, **kwargs: Any) -> Any:
        wall, cpu = time.perf_counter(), time.process_time()
        try:
            return plain(*args, **kwargs)
        finally:
            before, now = _spent[what], Took(time.perf_counter() - wall, time.process_time() - cpu)
            _spent[what] = Took(before.wall + now.wall, before.cpu + now.cpu)

    clocked.clocked = True  # type: ignore[attr-defined]
    setattr(owner, name, clocked)


def play(name: str) -> dict[str, Took]:
    """One step, and what of it was DSV's own."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    _spent.clear()
    took = take_turns({name: _stage[name]}, 0, *([dist.barrier] if several else []))
    if name in SPARSE:
        took[name + LOOKING] = _spent["looking"]
    return took
