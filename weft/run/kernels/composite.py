"""Composite: the backends that compute one call on a GPU, dense and sparse tiles, forward and backward."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import cache, partial

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
        self.grouped = all(kernel.grouped for kernel in (*dense, *self._sparse))
        one, other = _names(dense), _names(self._sparse)
        self.name = one if one == other else f"dense {one}, sparse {other}"

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
        if into is None or not self._splits(q, k, tiles):
            return self.pair(sparse=tiles.sparse)[0].attend(q, k, v, tiles, scale, into, fresh=fresh)
        for first, end, part in tiles.by_heads:
            some = partial(Tensor.narrow, dim=1, start=first, length=end - first)
            sums = some(into[0]), some(into[1])
            self.pair(sparse=part.sparse)[0].attend(some(q), some(k), some(v), part, scale, sums, fresh=fresh)
        return into

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._splits(q, k, tiles):
            return self.pair(sparse=tiles.sparse)[1].attend_backward(grad, q, k, v, done, tiles, scale)
        grads: list[tuple[Tensor, Tensor, Tensor]] = []
        for first, end, part in tiles.by_heads:
            some = partial(Tensor.narrow, dim=1, start=first, length=end - first)
            sums, backward = (some(done[0]), some(done[1])), self.pair(sparse=part.sparse)[1].attend_backward
            grads.append(backward(some(grad), some(q), some(k), some(v), sums, part, scale))
        dq, dk, dv = (torch.cat(parts, 1) for parts in zip(*grads, strict=True))
        return dq, dk, dv

    def pair(self, *, sparse: bool) -> Pair:
        """Return the kernels of the two directions for dense or for sparse tiles."""
        return self._sparse if sparse else self._dense

    def _splits(self, q: Tensor, k: Tensor, tiles: Tiles) -> bool:
        """Whether heads of which nothing is left out have calls of their own, of the dense kernel."""
        return self._dense is not self._sparse and q.shape[1] == k.shape[1] and len(tiles.by_heads) > 1


def _names(pair: Pair) -> str:
    return " and ".join(dict.fromkeys(kernel.name for kernel in pair))


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
            found = choice.decide(part, machine, judge)
            name = found.backend
            if name == "gather":
                _say_gather(str(part), tuple(found.passed.items()))
        if name not in made:
            made[name] = make(name)
        return made[name]

    dense = replace(work, sparse=False, block_q=0, block_k=0)
    pairs = [
        (kernel(replace(kind, backward=False)), kernel(replace(kind, backward=True)))
        for kind in ((dense, work) if work.sparse else (dense,))
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
def _say_gather(work: str, passed: tuple[tuple[str, str], ...]) -> None:
    """Once for each kind of work: it may be several times slower than a block-sparse kernel."""
    reasons = " ".join(f"{name}: {why}" for name, why in passed)
    _log.warning("The %s gathers rows for torch's flash attention. %s", work, reasons)
