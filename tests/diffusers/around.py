"""What people do around a parallelized model, done alike in one process and on ranks, and compared.

    @row("wan", "flux")                          # the models it needs, if not any
    def copy_of_copy(run):
        model = run.split(run.model())           # weft.parallelize, if there are ranks
        run.step("copy", copy.deepcopy(copy.deepcopy(model)))

A row records named tensors: outputs, and gradients averaged over the ranks, as DDP does. All ranks must
record what one process records. `may_refuse` rows may raise a WeftError instead.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import weft
from tests.diffusers.encoders import TEXT
from tests.diffusers.toys import normal
from tests.diffusers.zoo import ZOO
from weft.core.errors import CommError, WeftError
from weft.run.spawn.pool import Pool

LIMIT = 2e-5
"""Of a tensor's largest element, or of LEAST of the largest of its group: gradients of a key's bias are 0."""
LEAST = {torch.float64: 1e-3, torch.float32: 1.0}
REGIONS = ("wan", "flux", "sd3", "cogvideox-rotary", "ltx", "mochi", "hunyuan", "qwen-padded")
MODELS = (*REGIONS, "latte")
"""Diffusers has no LoRA for Latte."""


@dataclass
class Run:
    """One run of a row; without ranks, it is what one process does."""

    name: str
    dtype: torch.dtype = torch.float64
    seen: dict[str, Tensor] = field(default_factory=dict)
    split_steps: list[bool] = field(default_factory=list)
    """Of each step, whether ranks had different gradients before they were averaged."""

    @property
    def rank(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    @property
    def ranks(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else 1

    def model(self) -> Any:
        return latte(self.dtype) if self.name == "latte" else ZOO[self.name].make(self.dtype)

    def inputs(self, **sizes: Any) -> dict[str, Any]:
        given: Any = {"dtype": self.dtype, **sizes}
        return latte_inputs(**given) if self.name == "latte" else ZOO[self.name].inputs(**given)

    def split(self, target: Any, **options: Any) -> Any:
        return weft.parallelize(target, **options) if self.ranks > 1 else target

    def restore(self, target: Any) -> Any:
        return weft.restore(target) if self.ranks > 1 else target

    def seed(self) -> None:
        """Another one on each rank; rank 0's counts."""
        torch.manual_seed(5 + 7 * self.rank)

    def mean(self, x: Tensor) -> Tensor:
        """Over the ranks."""
        if self.ranks > 1:
            dist.all_reduce(x := x.clone())
        return x / self.ranks

    def keep(self, key: str, *values: Any) -> None:
        for at, value in enumerate(values):
            value = value.full_tensor() if isinstance(value, DTensor) else value
            self.seen[f"{key}/{at}"] = torch.as_tensor(value).detach().clone()

    def out(self, key: str, model: Any, **sizes: Any) -> Tensor:
        """Record an output."""
        with torch.no_grad():
            out = first(model(**self.inputs(**sizes)))
        self.keep(f"{key} out", out)
        return out

    def step(self, key: str, model: Any, *, averaged: bool = False, loss: Any = None, **sizes: Any) -> Tensor:
        """Record an output and the gradients, which are in .grad afterwards; FSDP and DDP average them."""
        model.zero_grad()
        out = first(model(**self.inputs(**sizes)))
        (weighted(out) if loss is None else loss(out)).backward()
        self.keep(f"{key} out", out)
        self.gradients(key, model, averaged=averaged)
        return out.detach()

    def gradients(self, key: str, model: Any, *, averaged: bool = False) -> None:
        weights = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        assert any(weight.grad is not None for weight in weights.values()), f"{key}: no gradients"
        if self.ranks > 1 and not averaged:
            self._average([*weights.values()])
        for name, weight in weights.items():
            grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
            self.keep(f"{key} grad {name}", grad)

    def _average(self, weights: list[nn.Parameter]) -> None:
        grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in weights]
        mean = torch.cat([grad.flatten() for grad in grads])
        own = mean.clone()
        dist.all_reduce(mean)
        mean /= self.ranks
        off = torch.tensor(float((own - mean).abs().max() > 1e-3 * mean.abs().max()))
        dist.all_reduce(off)
        self.split_steps.append(bool(off))
        for weight, grad in zip(weights, mean.split([grad.numel() for grad in grads]), strict=True):
            if weight.grad is not None or grad.any():
                weight.grad = grad.view_as(weight).clone()


def latte(dtype: torch.dtype) -> Any:
    """A model that is split by switching dims."""
    from tests.diffusers.checkpoints import TINY

    return TINY["latte"]().transformer.to(dtype)


def latte_inputs(dtype: torch.dtype, batch: int = 2, grid: Any = None) -> dict[str, Any]:
    width = 2 if grid is None else 4  # it knows one number of frames
    shapes = {"hidden_states": (batch, 4, 5, 2, width), "encoder_hidden_states": (batch, 7, TEXT)}
    given = {key: normal(*shape, dtype=dtype) for key, shape in shapes.items()}
    return {**given, "timestep": torch.tensor([3, 500][:batch]), "return_dict": False}


def first(out: Any) -> Tensor:
    out = out[0] if isinstance(out, list | tuple) else out.sample
    return torch.stack(out) if isinstance(out, list) else out


def weighted(out: Tensor) -> Tensor:
    """A loss that every rank computes alike."""
    return (out * normal(*out.shape, seed=7, dtype=out.dtype)).sum()


def descend(model: nn.Module, rate: float = 0.02) -> None:
    """Move each weight by its gradient, so far that outputs change."""
    with torch.no_grad():
        for weight in model.parameters():
            if weight.grad is not None:
                weight -= rate * weight.grad / (weight.grad.abs().max() + 1e-30)


@dataclass(frozen=True)
class Row:
    act: Callable[[Run], Any]
    models: tuple[str, ...]
    may_refuse: bool
    splits: bool
    """Whether the last step must have been split."""
    ranks: tuple[int, ...]

    def on(self, size: int) -> str:
        """The model of a normal run: over all rows, each size meets all models."""
        at = list(ROWS.values()).index(self) + size
        return self.models[at % len(self.models)]


ROWS: dict[str, Row] = {}


def row(
    *models: str, may_refuse: bool = False, splits: bool = True, ranks: tuple[int, ...] = (2, 3)
) -> Callable[[Callable[[Run], Any]], Callable[[Run], Any]]:
    """Add a function to the table; with a `models`, only these are tried."""

    def add(act: Callable[[Run], Any]) -> Callable[[Run], Any]:
        ROWS[act.__name__] = Row(act, models or MODELS, may_refuse, splits, ranks)
        return act

    return add


Outcome = Run | str


def perform(row: Row, model: str) -> Outcome:
    """What a row recorded, or how it failed: "refused: …" in weft's words, "raised: …" in others'."""
    run = Run(model)
    try:
        with numbers_kept():
            row.act(run)
        assert torch._C._len_torch_function_stack() == 0, "a function mode of weft's is left on"
    except CommError as error:
        return f"raised: {type(error).__name__}: {error}"
    except WeftError as error:
        return f"refused: {error}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the row's result
        return f"raised: {type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)[-9:])}"
    return run


@contextmanager
def numbers_kept() -> Iterator[None]:
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


@cache
def alone(name: str, model: str) -> Outcome:
    return perform(ROWS[name], model)


def check(name: str, model: str, pool: Pool) -> None:
    """Hold the ranks against one process."""
    table, answers, expected = ROWS[name], pool.run(perform, ROWS[name], model), alone(name, model)
    if table.may_refuse and all(isinstance(found, str) for found in answers):
        assert all(str(found).startswith("refused: ") for found in answers), answers[0]
        return
    assert isinstance(expected, Run), f"one process: {expected}"
    assert expected.seen, "nothing was recorded"
    for rank, found in enumerate(answers):
        assert isinstance(found, Run), f"rank {rank} {found}"
        assert (wrong := differences(expected.seen, found.seen)) == [], f"rank {rank}: {wrong[:4]}"
        assert not found.split_steps or found.split_steps[-1] == table.splits, "ranks computed everything"


def differences(expected: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    wrong = [f"only one has {key}" for key in expected.keys() ^ found.keys()]
    largest: dict[str, float] = {}
    for key, x in expected.items():
        group = key.partition(" grad ")[0]
        largest[group] = max(largest.get(group, 0.0), size(x))
    for key in expected.keys() & found.keys():
        x, y = expected[key], found[key]
        if x.shape != y.shape or x.dtype != y.dtype:
            wrong.append(f"{key}: {x.dtype} {list(x.shape)}, on ranks {y.dtype} {list(y.shape)}")
            continue
        least = LEAST.get(x.dtype, 1e-3) * largest[key.partition(" grad ")[0]]
        off = size(x.double() - y.double())
        if not off <= LIMIT * max(size(x), least):
            wrong.append(f"{key} is off by {off / max(size(x), least, 1e-30):.1e}")
    return sorted(wrong)


def size(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0
