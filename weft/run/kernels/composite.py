"""Composite: the backends that compute one call on a GPU, dense and sparse tiles, forward and backward."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.run.kernels import Kernel, Sums, choice, make
from weft.run.kernels.choice import Judge, Machine
from weft.run.kernels.machine import machine_of
from weft.run.kernels.rules import Work
from weft.run.kernels.tiles import Tiles

_log = logging.getLogger(__name__)

Pair = tuple[Kernel, Kernel]
"""The kernels of the two directions."""


class Composite:
    """One kernel for dense and one for sparse tiles, in each direction. All ranks must have the same name."""

    def __init__(self, dense: Pair, sparse: Pair | None = None) -> None:
        self._dense, self._sparse = dense, sparse or dense
        kernels = {*dense, *self._sparse}
        self.grouped = all(kernel.grouped for kernel in kernels)
        names = [
            " and ".join(dict.fromkeys(kernel.name for kernel in pair)) for pair in (dense, sparse or ())
        ]
        self.name = names[0] if len({*names, ""}) == 2 else f"dense {names[0]}, sparse {names[1]}"

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tiles: Tiles,
        scale: float,
        into: Sums | None = None,
        *,
        fresh: bool = False,
    ) -> Sums:
        kernel = (self._sparse if tiles.sparse else self._dense)[0]
        return kernel.attend(q, k, v, tiles, scale, into, fresh=fresh)

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = (self._sparse if tiles.sparse else self._dense)[1]
        return kernel.attend_backward(grad, q, k, v, done, tiles, scale)


def compose(backend: str, work: Work, device: torch.device, judge: Judge | None = None) -> Composite:
    """Choose the kernels of a call on a GPU, or refuse the backend that was asked for, with the reason.

    A named backend must serve the forward of the call's tiles. Whatever else of the call it does not serve
    (its backward, tiles of a sparse mask that are all active) is chosen as `auto` does.
    """
    machine = machine_of(device)
    _check(backend, replace(work, backward=False), machine, judge)
    made: dict[str, Kernel] = {}

    def kernel(part: Work) -> Kernel:
        name = backend
        if backend == "auto" or _why_not(backend, part, machine, judge):
            name = choice.decide(part, machine, judge).backend
        if name == "gather" and backend == "auto":
            _say_gather(part, machine)
        return made.setdefault(name, make(name))

    kinds = (False, True) if work.sparse else (False,)
    pairs = [
        (
            kernel(replace(work, sparse=sparse, backward=False)),
            kernel(replace(work, sparse=sparse, backward=True)),
        )
        for sparse in kinds
    ]
    return Composite(*pairs)


def _check(backend: str, work: Work, machine: Machine, judge: Judge | None) -> None:
    if backend == "auto" or not (why := _why_not(backend, work, machine, judge)):
        return
    better = choice.decide(work, machine, judge).backend
    raise InputError(
        f"backend={backend!r} cannot serve the {work} on {machine.arch}: {why}",
        hint=f"backend='auto' takes {better!r}; backend='exact' computes anything in float32.",
    )


def _why_not(backend: str, work: Work, machine: Machine, judge: Judge | None) -> str:
    return choice.cannot(backend, work, machine) or (judge(backend, work) if judge else "")


@cache
def _say_gather(work: Work, machine: Machine) -> None:
    """Once for each kind of work: it may be several times slower than a block-sparse kernel."""
    passed = choice.decide(work, machine).passed
    reasons = "; ".join(f"{name}: {why}" for name, why in passed.items())
    _log.warning("The %s gathers rows for torch's flash attention. %s", work, reasons)
