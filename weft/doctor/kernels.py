"""Kernels: every attention backend by dtype, head dim and kind of tiles, both directions, against float64.

Combinations are spread over the ranks, those whose speed is taken first, then in an order in which every
pair of choices comes early: a part that runs out of time has missed as little as possible.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import partial
from itertools import combinations, product

import numpy as np
import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.doctor.kernel_speed import speeds
from weft.doctor.part import Check, Site
from weft.doctor.parts import BACKENDS_TRIED
from weft.run.check import TOLERANCE
from weft.run.kernels import Kernel, choice, make
from weft.run.kernels.choice import Machine, cannot
from weft.run.kernels.machine import machine_of
from weft.run.kernels.parity_sample import Sample, compute
from weft.run.kernels.rules import HALF, Work
from weft.run.kernels.tiles import Tiles

HEAD_DIMS = (128, 64, 96, 72, 256, 80, 32, 160, 192)
REHEARSED_DIMS = (128, 72)
EXTRAS = {"fa4": "fa4", "cudnn_sparse": "cudnn", "triton": "gpu"}
"""What `pip install 'weft[…]'` brings a package."""
GROUPED_HEADS = "weft repeats key/value heads for it before it is called."
UNTUNED = "by its first configuration; calls measure others when they are made."
RESERVED_SECONDS = 4.0
KV_HEADS, BLOCKS, DENSE_LENGTH = 2, 3, 384
PRIMES = (331, 397)
"""Queries and keys that no block or tile divides."""


@dataclass(frozen=True)
class Kind:
    """What is computed: tokens of a block of the mask (0 is dense), and what is unusual about it."""

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
    """One cell of the matrix, of which every pair of fields is tried early."""

    kind: str
    dtype: str
    head_dim: int
    is_backward: bool

    def __str__(self) -> str:
        direction = "backward" if self.is_backward else "forward"
        return f"{self.dtype} · D{self.head_dim} · {self.kind} · {direction}"

    @property
    def work(self) -> Work:
        kind = KINDS[self.kind]
        what = kind.block_q > 0, self.is_backward, self.head_dim, self.dtype
        return Work(*what, kind.block_q, kind.block_k, kind.group)

    @property
    def is_timed(self) -> bool:
        """Whether speed is taken, too: of the most common ones."""
        return self.kind in TIMED_KINDS and self.dtype == "bfloat16" and self.head_dim in TIMED_DIMS


def checks(backend: str, site: Site) -> Iterator[Check]:
    """Try what a backend serves, this rank's share of it; say once for each reason what it does not serve."""
    if why := _missing(backend, site):
        yield Check(name=backend, status="skipped", note=why)
        return
    machine = Machine("sm_90", frozenset({backend})) if site.is_rehearsal else machine_of(site.device)
    yield from matrix(backend, make(backend), machine, site)


def matrix(backend: str, kernel: Kernel, machine: Machine, site: Site) -> Iterator[Check]:
    """Judge this rank's share of the combinations that a kernel serves on a machine."""
    refused: dict[str, list[Combination]] = {}
    for each in _all(backend, site):
        refused.setdefault(_refusal(backend, kernel, each.work, machine), []).append(each)
    order = pairs_first(refused.pop("", []), is_short=site.is_rehearsal)
    for why, some in refused.items():
        name = f"{len(some)} combination{'s' * (len(some) > 1)}, such as {str(some[0]).replace(' ·', '')}"
        yield Check(name=name, status="skipped", note=why)
    yield from _tried(kernel, order[site.rank :: site.ranks], site)


def _missing(backend: str, site: Site) -> str:
    """Return why nothing of a backend can be tried here."""
    if site.is_rehearsal and not (backend == "exact" or _is_interpreted(backend)):
        return f"it computes on a GPU, not on {site.device.type}."
    if backend in choice.DISTRIBUTIONS and backend not in choice.installed():
        package = " and ".join(choice.DISTRIBUTIONS[backend])
        return f"it needs {package}, which is not here: pip install 'weft[{EXTRAS[backend]}]'."
    return ""


def _is_interpreted(backend: str) -> bool:
    return backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"


def _all(backend: str, site: Site) -> list[Combination]:
    dtypes = (*HALF, "float32") if backend == "exact" else HALF
    if site.is_rehearsal and backend == "triton":
        dtypes = ("float16",)  # Triton's interpreter has no bfloat16
    head_dims = REHEARSED_DIMS if site.is_rehearsal else HEAD_DIMS
    return [Combination(*each) for each in product(KINDS, dtypes, head_dims, (False, True))]


def _refusal(backend: str, kernel: Kernel, work: Work, machine: Machine) -> str:
    if work.group > 1 and not kernel.grouped:
        return GROUPED_HEADS
    return cannot(backend, work, machine)


def pairs_first(every: Sequence[Combination], *, is_short: bool = False) -> list[Combination]:
    """Order combinations: the timed ones, then greedily whatever has most pairs that none before it has.

    `is_short` ends the list where all pairs were seen.
    """
    order = [each for each in every if each.is_timed and not is_short]
    left = [each for each in every if each not in order]
    seen = {pair for each in order for pair in _pairs(each)}
    while left:
        best = max(left, key=lambda each: len(_pairs(each) - seen))
        if _pairs(best) <= seen:
            return order if is_short else order + left
        left.remove(best)
        order.append(best)
        seen |= _pairs(best)
    return order


def _pairs(each: Combination) -> set[object]:
    return set(combinations(enumerate(astuple(each)), 2))


def _tried(kernel: Kernel, order: Sequence[Combination], site: Site) -> Iterator[Check]:
    """Judge one by one, and say how many are left where the time is over."""
    longest = 0.0
    for done, each in enumerate(order):
        if site.left() < max(RESERVED_SECONDS, 1.5 * longest):
            note = f"{len(order) - done} of {len(order)} combinations of this rank were not reached in time."
            yield Check(name=f"not reached, rank {site.rank}", status="skipped", note=note)
            return
        start = time.monotonic()
        if site.begins(str(each)):
            yield _judged(kernel, each, site)
        longest = max(longest, time.monotonic() - start)


def _judged(kernel: Kernel, each: Combination, site: Site) -> Check:
    """Compare one combination; what a kernel raises is wrong, but for errors that end the CUDA context."""
    note = ""
    # What is computed in float32 inside is not rounded to 16 bits anywhere.
    allowed = TOLERANCE["float32" if kernel.name == "exact" else each.dtype]
    try:
        sample = Sample.drawn(KINDS[each.kind].tiles(), each.work)
        on_device = {name: getattr(sample, name).to(site.device) for name in ("q", "k", "v", "grad")}
        computed = compute(kernel, replace(sample, **on_device), each.work, site.device)
        errors = {name: site.error(*_comparable(name, *pair)) for name, pair in computed.items()}
        worst = max(errors, key=lambda name: errors[name])
        numbers = {"error": errors[worst], "allowed": allowed}
        if errors[worst] > allowed:
            return Check(name=str(each), status="wrong", note=f"its {worst} is wrong.", numbers=numbers)
        if each.is_timed and not site.is_rehearsal:
            numbers |= speeds(kernel, each.work, site.device)
            note = UNTUNED if kernel.name == "triton" else ""
        return Check(name=str(each), status="ok", note=note, numbers=numbers)
    except torch.AcceleratorError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a package raises
        reason = str(error).strip().partition("\n")[0]
        return Check(name=str(each), status="wrong", note=f"it raised {type(error).__name__}: {reason}")


def _comparable(name: str, found: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
    """Both in units of the largest number expected; of a log-sum-exp what it makes of weights, each 1."""
    if found.shape != expected.shape:
        raise InputError(f"its {name} has shape {tuple(found.shape)}, not {tuple(expected.shape)}.")
    found, expected = found.double(), expected.to(found.device)
    if name == "lse":
        found = torch.where(found == expected, 0.0, found - expected).exp()
        return found, torch.ones_like(found)
    largest = expected.abs().max()
    return found / largest, expected / largest


def _checks_of(backends: Iterable[str]) -> Iterator[partial[Iterator[Check]]]:
    return (partial(checks, backend) for backend in backends)


flash, cudnn, triton, gather, exact, fa4, cudnn_sparse = _checks_of(BACKENDS_TRIED)
