"""Composite kernel of a GPU: one backend each for dense and sparse tiles, forward and backward."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.run.kernels import Accumulator, AttentionKernel, Sums, choice, make
from weft.run.kernels.choice import ParityCheck, platform_of
from weft.run.kernels.rules import KernelSpec
from weft.run.kernels.tiles import Tiles

_log = logging.getLogger(__name__)

Pair = tuple[AttentionKernel, AttentionKernel]
"""The kernels of the two directions."""


class Composite:
    """One kernel for dense and one for sparse tiles, in each direction; ranks compare its `name`."""

    def __init__(self, dense: Pair, sparse: Pair | None = None) -> None:
        self._dense, self._sparse = dense, sparse or dense
        self.grouped = all(kernel.grouped for kernel in (*dense, *self._sparse))
        one, other = _names(dense), _names(self._sparse)
        self.name = one if one == other else f"dense {one}, sparse {other}"

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tiles: Tiles, scale: float, into: Accumulator | None = None
    ) -> Sums:
        if into is None or not self._splits(q, k, tiles):
            return self.pair(sparse=tiles.sparse)[0].attend(q, k, v, tiles, scale, into)
        for some, (kernel, _), group in self._head_groups(tiles):
            sums = Accumulator(some(into.out), some(into.lse), into.fresh)
            kernel.attend(some(q), some(k), some(v), group, scale, sums)
        return into.out, into.lse

    def attend_backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, done: Sums, tiles: Tiles, scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not self._splits(q, k, tiles):
            return self.pair(sparse=tiles.sparse)[1].attend_backward(grad, q, k, v, done, tiles, scale)
        grads: list[tuple[Tensor, Tensor, Tensor]] = []
        for some, (_, kernel), group in self._head_groups(tiles):
            sums = some(done[0]), some(done[1])
            grads.append(kernel.attend_backward(some(grad), some(q), some(k), some(v), sums, group, scale))
        dq, dk, dv = (torch.cat(parts, 1) for parts in zip(*grads, strict=True))
        return dq, dk, dv

    def pair(self, *, sparse: bool) -> Pair:
        """Return the kernels of the two directions for dense or for sparse tiles."""
        return self._sparse if sparse else self._dense

    def _head_groups(self, tiles: Tiles) -> Iterator[tuple[Callable[[Tensor], Tensor], Pair, Tiles]]:
        for first, end, group in tiles.by_heads:
            narrow = partial(Tensor.narrow, dim=1, start=first, length=end - first)
            yield narrow, self.pair(sparse=group.sparse), group

    def _splits(self, q: Tensor, k: Tensor, tiles: Tiles) -> bool:
        """Whether heads without masked tiles are computed separately, by the dense kernel."""
        return self._dense is not self._sparse and q.shape[1] == k.shape[1] and len(tiles.by_heads) > 1


def _names(pair: Pair) -> str:
    return " and ".join(dict.fromkeys(kernel.name for kernel in pair))


def compose(
    backend: str, spec: KernelSpec, device: torch.device, check: ParityCheck | None = None
) -> Composite:
    """Choose the kernels of a call on a GPU; raise if a named backend cannot serve.

    A named backend must serve the forward of the call's tiles. For what else it does not serve (its backward,
    tiles of a sparse mask that are all active) a backend is chosen as by `auto`.
    """
    platform = platform_of(device)
    forward = replace(spec, backward=False)
    if backend != "auto" and (why := choice.refusal(backend, forward, platform, check)):
        better = choice.decide(forward, platform, check).backend
        raise InputError(
            f"backend={backend!r} cannot serve the {forward} on {platform.arch}: {why}",
            hint=f"backend='auto' takes {better!r}; backend='exact' computes anything in float32.",
        )
    made: dict[str, AttentionKernel] = {}

    def kernel(kind: KernelSpec) -> AttentionKernel:
        name = backend
        if backend == "auto" or choice.refusal(backend, kind, platform, check):
            decision = choice.decide(kind, platform, check)
            name = decision.backend
            if name == "gather":
                _warn_gather(str(kind), tuple(decision.passed.items()))
        if name not in made:
            made[name] = make(name)
        return made[name]

    dense = replace(spec, sparse=False, block_q=0, block_k=0)
    pairs = [
        (kernel(replace(kind, backward=False)), kernel(replace(kind, backward=True)))
        for kind in ((dense, spec) if spec.sparse else (dense,))
    ]
    return Composite(*pairs)


@cache
def _warn_gather(spec: str, passed: tuple[tuple[str, str], ...]) -> None:
    """Warn once for each spec: gathering may be several times slower than a block-sparse kernel."""
    reasons = " ".join(f"{name}: {why}" for name, why in passed)
    _log.warning("The %s gathers rows for torch's flash attention. %s", spec, reasons)
