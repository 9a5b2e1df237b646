"""What a rank of `bench.pipeline` does: ask a contender, judge its answer, and take its turn."""

from __future__ import annotations

import gc
import logging
import warnings
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.pipeline_peers import CONTENDERS, REST, SPARSE, Inputs, PeerModel, masked
from bench.rows import Took, take_turns

OUTPUT, GRADIENT = 2e-5, 1e-4


class PeerAnswer(NamedTuple):
    """An output, and the gradients of all parameters in one vector, if they were asked for."""

    out: Tensor
    grads: Tensor | None


class PeerVerdict(NamedTuple):
    """The largest error of the output, that of the gradients relative to their norm, or what was raised."""

    error: float
    grads: float = 0.0
    note: str = ""

    @property
    def correct(self) -> bool:
        return self.error <= OUTPUT and self.grads <= GRADIENT

    def __str__(self) -> str:
        wrong = "" if self.correct or self.error == float("inf") else "WRONG: "
        error = "" if self.error == float("inf") else f"error {self.error:.0e}"
        return wrong + error + (f", gradients {self.grads:.0e}" if self.grads else "") + self.note


_stage: dict[str, Callable[[], Tensor]] = {}


def answer(model: PeerModel, backward: bool, sparse: bool) -> PeerAnswer:  # noqa: FBT001 - a pool passes by position
    """One process's."""
    _hush()
    module, inputs = model.build()
    one = masked(module, model) if sparse else module
    out = _call(one, inputs, module if backward else None)()
    return PeerAnswer(out, _gradients(module) if backward else None)


def prepare(
    model: PeerModel, names: Iterable[str], right: PeerAnswer, sparse: PeerAnswer | None
) -> dict[str, PeerVerdict]:
    """Ask some contenders once, and put on stage who is right; of gradients, if the right answer has them."""
    _hush()
    _stage.clear()
    gc.unfreeze()
    gc.collect()
    verdicts = {name: _ask(name, model, sparse if name == SPARSE and sparse else right) for name in names}
    gc.collect()
    gc.freeze()
    return verdicts


def _ask(name: str, model: PeerModel, right: PeerAnswer) -> PeerVerdict:
    module, inputs = model.build()
    try:
        built = CONTENDERS[name].build(module, model)
        call = _call(built, inputs, None if right.grads is None else module)
        out = call()
        error = float((out - right.out).abs().max())
        verdict = PeerVerdict(0.0, note=", not compared") if name == REST else PeerVerdict(error)
        if right.grads is not None:
            verdict = PeerVerdict(error, *_nearest(_gradients(module), right.grads))
    except Exception as error:
        reason = " ".join(str(error).split())
        return PeerVerdict(float("inf"), note=f"raises {type(error).__name__}: {reason[:90]}")
    if verdict.correct:
        _stage[name] = call
    return verdict


def _call(module: nn.Module, inputs: Inputs, training: nn.Module | None) -> Callable[[], Tensor]:
    def forward() -> Tensor:
        with torch.no_grad():
            return module(**inputs, return_dict=False)[0]

    def both() -> Tensor:
        if training is not None:
            training.zero_grad()
        out = module(**inputs, return_dict=False)[0]
        out.backward(out.detach())
        return out.detach()

    return forward if training is None else both


def _gradients(module: nn.Module) -> Tensor:
    grads = (torch.zeros_like(p) if p.grad is None else p.grad for p in module.parameters())
    return torch.cat([grad.flatten() for grad in grads])


def _nearest(own: Tensor, right: Tensor) -> tuple[float, str]:
    """Diffusers' gradients are to be added up over ranks, those of DDP to be averaged."""
    total = own.clone()
    dist.all_reduce(total)
    meant = {"summed": total, "averaged": total / dist.get_world_size()}
    error, meaning = min(
        (float((expected - right).norm() / right.norm()), meaning) for meaning, expected in meant.items()
    )
    return error, f" {meaning} over ranks"


def play(name: str) -> Took:
    several = dist.is_initialized() and dist.get_world_size() > 1
    return take_turns({name: _stage[name]}, 0, *([dist.barrier] if several else []))[name]


def _hush() -> None:
    """What the peers say would tear the progress bar."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
