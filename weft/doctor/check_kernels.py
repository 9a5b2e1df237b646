"""Check attention backends by dtype, head dim and kind of tiles, in both directions, against float64.

Combinations are spread over the ranks: first those that are timed, then in an order in which every pair of
choices comes early, so that a suite that runs out of time misses as little as possible.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import combinations, product

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.doctor.kernel_speed import speeds
from weft.doctor.suite import Check, CheckContext
from weft.run.kernels import AttentionKernel, choice, make
from weft.run.kernels.choice import GpuPlatform, platform_of, refusal
from weft.run.kernels.parity_sample import ParitySample, run_on_sample
from weft.run.kernels.rules import HALF, KernelSpec
from weft.run.kernels.tiles import Tiles
from weft.run.measure.compare import TOLERANCE

HEAD_DIMS = (128, 64, 96, 72, 256, 80, 32, 160, 192)
REHEARSED_DIMS = (128, 72)
EXTRAS = {"fa4": "fa4", "cudnn_sparse": "cudnn", "triton": "gpu"}
"""The extra of `pip install 'weft[…]'` for each package."""
GROUPED_HEADS = "weft repeats key/value heads for it before it is called."
UNTUNED = "by its first configuration; calls measure others when they are made."
RESERVED_SECONDS = 4.0
KV_HEADS, BLOCKS, DENSE_LENGTH = 2, 3, 384
PRIMES = (331, 397)
"""Queries and keys that no block or tile divides."""


@dataclass(frozen=True)
class Kind:
    """The tiles of a combination: tokens of a block of the mask (0 is dense), and special cases."""

    block_q: int = 0
    block_k: int = 0
    is_ragged: bool = False
    has_empty_rows: bool = False
    group: int = 1

    def tiles(self) -> Tiles:
        rows, keys = PRIMES if self.is_ragged else (self._length(self.block_q), self._length(self.block_k))
        if not self.block_q:
            return Tiles(None, rows, keys, rows, keys)
        shape = KV_HEADS * self.group, -(-rows // self.block_q), -(-keys // self.block_k)
        active = np.random.default_rng(7).random(shape) < 0.6
        active[..., 0] = True
        active[-1, :, 0], active[-1, :, -1] = False, True  # a head that reads the last keys, not the first
        if self.has_empty_rows:
            active[0, 1] = active[-1, 0] = False
        return Tiles(active, self.block_q, self.block_k, rows, keys)

    def _length(self, block: int) -> int:
        return BLOCKS * block or DENSE_LENGTH


KINDS = {
    "dense": Kind(),
    "sparse 128": Kind(128, 128),
    "sparse 64": Kind(64, 64),
    "ragged": Kind(is_ragged=True),
    "ragged sparse": Kind(128, 128, is_ragged=True),
    "empty rows": Kind(128, 128, has_empty_rows=True),
    "grouped heads": Kind(group=2),
    "grouped sparse": Kind(128, 128, group=2),
    "sparse 256x128": Kind(256, 128),
}
TIMED_KINDS, TIMED_DIMS = ("dense", "sparse 128"), (64, 128)


@dataclass(frozen=True)
class Combination:
    """One cell of the matrix; every pair of fields is tried early."""

    kind: str
    dtype: str
    head_dim: int
    is_backward: bool

    def __str__(self) -> str:
        direction = "backward" if self.is_backward else "forward"
        return f"{self.dtype} · D{self.head_dim} · {self.kind} · {direction}"

    @property
    def work(self) -> KernelSpec:
        kind = KINDS[self.kind]
        is_sparse = kind.block_q > 0
        return KernelSpec(
            is_sparse, self.is_backward, self.head_dim, self.dtype, kind.block_q, kind.block_k, kind.group
        )

    @property
    def is_timed(self) -> bool:
        """Whether the speed is measured too: of the most common ones."""
        return self.kind in TIMED_KINDS and self.dtype == "bfloat16" and self.head_dim in TIMED_DIMS


def checks(backend: str, ctx: CheckContext) -> Iterator[Check]:
    """Check this rank's share of what a backend serves; skip the rest, with one check for each reason."""
    if why := _missing(backend, ctx):
        yield Check(name=backend, status="skipped", note=why)
        return
    machine = GpuPlatform("sm_90", frozenset({backend})) if ctx.is_rehearsal else platform_of(ctx.device)
    yield from matrix(backend, make(backend), machine, ctx)


def matrix(backend: str, kernel: AttentionKernel, machine: GpuPlatform, ctx: CheckContext) -> Iterator[Check]:
    """Judge this rank's share of the combinations that a kernel serves on a machine."""
    refused: dict[str, list[Combination]] = {}
    for each in _all(backend, ctx):
        is_repeated = each.work.group > 1 and not kernel.grouped
        why = GROUPED_HEADS if is_repeated else refusal(backend, each.work, machine)
        refused.setdefault(why, []).append(each)
    order = pairs_first(refused.pop("", []), is_short=ctx.is_rehearsal)
    for why, some in refused.items():
        name = f"{len(some)} combination{'s' * (len(some) > 1)}, such as {str(some[0]).replace(' ·', '')}"
        yield Check(name=name, status="skipped", note=why)
    yield from _tried(kernel, order[ctx.rank :: ctx.ranks], ctx)


def _missing(backend: str, ctx: CheckContext) -> str:
    """Return why a backend cannot run here, or ""."""
    is_interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
    if ctx.is_rehearsal and not (backend == "exact" or is_interpreted):
        return f"it computes on a GPU, not on {ctx.device.type}."
    if backend in choice.DISTRIBUTIONS and backend not in choice.installed():
        package = " and ".join(choice.DISTRIBUTIONS[backend])
        return f"it needs {package}, which is not installed (the extra {EXTRAS[backend]!r} of weft)."
    return ""


def _all(backend: str, ctx: CheckContext) -> list[Combination]:
    dtypes = (*HALF, "float32") if backend == "exact" else HALF
    if ctx.is_rehearsal and backend == "triton":
        dtypes = ("float16",)  # Triton's interpreter has no bfloat16
    head_dims = REHEARSED_DIMS if ctx.is_rehearsal else HEAD_DIMS
    return [Combination(*each) for each in product(KINDS, dtypes, head_dims, (False, True))]


def pairs_first(every: Sequence[Combination], *, is_short: bool = False) -> list[Combination]:
    """Order combinations: the timed ones, then greedily those with most pairs that none before them has.

    `is_short` ends the list when all pairs are covered.
    """
    order = [each for each in every if each.is_timed and not is_short]
    left = [each for each in every if each not in order]
    covered = {pair for each in order for pair in _pairs(each)}
    while left:
        best = max(left, key=lambda each: len(_pairs(each) - covered))
        if _pairs(best) <= covered:
            return order if is_short else order + left
        left.remove(best)
        order.append(best)
        covered |= _pairs(best)
    return order


def _pairs(each: Combination) -> set[object]:
    return set(combinations(enumerate(astuple(each)), 2))


def _tried(kernel: AttentionKernel, order: Sequence[Combination], ctx: CheckContext) -> Iterator[Check]:
    """Judge one by one, and report how many are left when the time is over."""
    longest = 0.0
    for done, each in enumerate(order):
        if ctx.left() < max(RESERVED_SECONDS, 1.5 * longest):
            note = f"{len(order) - done} of {len(order)} combinations of this rank were not reached in time."
            yield Check(name=f"not reached, rank {ctx.rank}", status="skipped", note=note)
            return
        start = time.monotonic()
        if ctx.begins(str(each)):
            yield _judged(kernel, each, ctx)
        longest = max(longest, time.monotonic() - start)


def _judged(kernel: AttentionKernel, each: Combination, ctx: CheckContext) -> Check:
    """Compare one combination; any exception is wrong, except those that end the CUDA context."""
    name = str(each)
    # `exact` computes in float32 and rounds nothing to 16 bits.
    allowed = TOLERANCE["float32" if kernel.name == "exact" else each.dtype]
    try:
        sample = ParitySample.drawn(KINDS[each.kind].tiles(), each.work)
        on_device = {tensor: getattr(sample, tensor).to(ctx.device) for tensor in ("q", "k", "v", "grad")}
        computed = run_on_sample(kernel, replace(sample, **on_device), each.work, ctx.device)
        errors = {tensor: ctx.error(*_comparable(tensor, *pair)) for tensor, pair in computed.items()}
        worst = max(errors, key=lambda tensor: errors[tensor])
        if errors[worst] > allowed:
            return Check.judged(name, errors[worst], allowed, note=f"its {worst} is wrong.")
        is_timed = each.is_timed and not ctx.is_rehearsal
        numbers = speeds(kernel, each.work, ctx.device) if is_timed else {}
        note = UNTUNED if is_timed and kernel.name == "triton" else ""
        return Check.judged(name, errors[worst], allowed, note=note, numbers=numbers)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a package raises
        reason = str(error).strip().partition("\n")[0]
        return Check(name=name, status="wrong", note=f"it raised {type(error).__name__}: {reason}")


def _comparable(name: str, actual: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Scale both by the largest expected value; turn a log-sum-exp into weights, which are 1."""
    if actual.shape != expected.shape:
        raise InputError(f"its {name} has shape {tuple(actual.shape)}, not {tuple(expected.shape)}.")
    actual, expected = actual.double(), expected.to(actual.device)
    if name == "lse":
        actual = torch.where(actual == expected, 0.0, actual - expected).exp()
        return actual, torch.ones_like(actual)
    largest = expected.abs().max()
    return actual / largest, expected / largest
