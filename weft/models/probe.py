"""Probe: run a model twice on few rows of a dim, and find where a row depends on more than itself.

The second run has rows of noise before and behind the same rows. What computes each row by itself gives the
same rows again; what mixes them, or counts them, or goes by their places does not.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.core.errors import InputError
from weft.models.adapter import modules
from weft.models.still import still

NOISE = 3.0
"""Its standard deviation, of the mean of the row that it replaces: little mixing is to be seen."""
SAMPLED = 64
"""Of a dim with more elements, so many are compared."""
NONE, AROUND, MOVED = range(3)
"""Noise: so many rows before and so many behind the others, or the other way round."""
CAUSES = (
    (AROUND, AROUND, "other {}"),
    (AROUND, MOVED, "its place among this rank's {}"),
    (NONE, AROUND, "the number of this rank's {}"),
)
"""What a row depends on, if two runs differ: with other noise, other places, or more rows."""
FINE, FAILED, MIXES = range(3)
Blamed = tuple[str, str]
"""The name of a module, and the dim that its rows are of."""
Probe = Callable[["Trace", int, int], "Blamed | None"]
"""Runs a model twice, with such noise; returns the first module whose rows differ."""


def find_mixing(model: nn.Module, comms: Sequence[Any], probes: Sequence[Probe]) -> tuple[Blamed, str] | None:
    """The module whose rows depend on more than themselves, and what on: the same for all ranks.

    Of several probes the next is tried where a model cannot run as one of them would have it.
    """

    def worst(outcome: int) -> int:
        for comm in comms:
            outcome = max(each for (each,) in comm.gather_numbers([outcome]))
        return outcome

    failure: Exception | None = None
    for probe in probes:
        try:
            outcome = FINE if probe(Trace(model), NONE, AROUND) is None else MIXES
        except Exception as error:  # noqa: BLE001 - whatever a model may raise for other sizes
            outcome, failure = FAILED, error
        outcome = worst(outcome)
        if outcome == MIXES:  # on some rank: what, or that it was rounding, more runs tell
            blamed = _explained(model, probe)
            if worst(FINE if blamed is None else MIXES) == MIXES:
                return blamed or (("", ""), "other {}, as another rank found")
            return None
        if outcome == FINE:
            return None
    # What weft refuses, it refuses in the forward itself, with more to say. All ranks warn: it may raise.
    if not isinstance(failure, InputError):
        what = type(model).__name__
        warnings.warn(f"{what} could not be probed for modules that mix tokens: {failure}", stacklevel=3)
    return None


def _explained(model: nn.Module, probe: Probe) -> tuple[Blamed, str] | None:
    for first, second, cause in CAUSES:
        trace = Trace(model, every=True)
        trace.limit *= 8 if first == NONE else 1  # rounding differs with the number of rows
        if (blamed := probe(trace, first, second)) is not None:
            return blamed, cause
    return None


class Rows(NamedTuple):
    """One dim in both runs: its sizes, and runs (start, start, length) of the rows that both have."""

    first: int
    second: int
    same: tuple[tuple[int, int, int], ...]

    def pairs(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of two tensors that must be the same, for each dim that may be this one."""
        for dim in range(min(x.dim(), y.dim())):
            folded, rest = divmod(x.shape[dim], self.first)
            rests = [[*t.shape[:dim], *t.shape[dim + 1 :]] for t in (x, y)]
            if not folded or rest or y.shape[dim] != folded * self.second or rests[0] != rests[1]:
                continue
            yield self._rows(x.unflatten(dim, (folded, -1)), y.unflatten(dim, (folded, -1)), dim + 1)
            if folded > 1:  # with another dim, of which either may be the inner one
                yield self._rows(x.unflatten(dim, (-1, folded)), y.unflatten(dim, (-1, folded)), dim)

    def _rows(self, x: Tensor, y: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        return (
            torch.cat([x.narrow(dim, a, length) for a, _, length in self.same], dim),
            torch.cat([y.narrow(dim, b, length) for _, b, length in self.same], dim),
        )


class Trace:
    """What the modules of a model give in a first run, and by how much a second one differs."""

    def __init__(self, model: nn.Module, *, every: bool = False) -> None:
        self.model = model
        self.dim = ""
        """What the rows are of, where a model has several such dims."""
        self.every = every
        """Whether inputs and outputs of all modules are compared, or only outputs of the innermost ones."""
        self.rows: list[Rows] = []
        """Of the second run: the dims that its rows may be in."""
        self.whole: set[int] = set()
        """Sizes of dims of which all rows are compared, however many."""
        self.limit = 1 / 8
        """Of the root of the rounding error: differences up to it are rounding."""
        self.errors: dict[tuple[str, str, int], tuple[str, Tensor]] = {}
        self._first: dict[tuple[str, str, int], Tensor] = {}
        self._count: Counter[tuple[str, str]] = Counter()
        self._running: list[str] = []
        self._eps = torch.finfo(torch.float32).eps

    def run(self, forward: Callable[[], Any], rows: Sequence[Rows] = ()) -> None:
        """The first run, or one that is compared with it."""
        self.rows = list(rows)
        self._count.clear()
        self.errors.clear()
        self._running = []
        with still(self.model), self._hooked():
            forward()

    @property
    def running(self) -> str:
        """The innermost module that runs, as far as modules are followed."""
        return self._running[-1] if self._running else ""

    def note(self, owner: str, what: str, value: Any) -> None:
        """Keep or compare what a module has computed."""
        for x in tree_leaves(value):
            if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()) or not x.numel():
                continue
            key = owner, what, self._count[owner, what]
            self._count[owner, what] += 1
            x = self._sampled(torch.view_as_real(x) if x.is_complex() else x)
            if x.element_size() > 1:
                self._eps = max(self._eps, torch.finfo(x.dtype).eps)
            if not self.rows:
                self._first[key] = x.clone()
            elif (first := self._first.get(key)) is not None:
                error = _error(first, x, self.rows)
                self.errors |= {} if error is None else {key: (self.dim, error)}

    def _sampled(self, x: Tensor) -> Tensor:
        """Some elements of each long dim that is not the rows'."""
        step = [1 if any(not size % n for n in self.whole) else -(-size // SAMPLED) for size in x.shape]
        return x.detach()[tuple(slice(None, None, each) for each in step)]

    def blamed(self) -> Blamed | None:
        """The first module whose rows were others in the second run than in the first."""
        limit = self._eps**0.5 * self.limit
        errors = torch.stack([error for _, error in self.errors.values()]).tolist() if self.errors else []
        for ((owner, *_), (dim, _)), error in zip(self.errors.items(), errors, strict=True):
            if error > limit:
                return owner, dim
        return None

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        def before(name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
            self.note(self.running, f"the input of {name}", (args, kwargs))
            self._running.append(name)

        def after(name: str, _: nn.Module, __: Any, out: Any) -> None:
            self.note(name, "output", out)
            if self.every:
                self._running.pop()

        with ExitStack() as stack:
            for name, module in modules(self.model).items():
                if not name or not (self.every or next(module.children(), None) is None):
                    continue
                hook = module.register_forward_hook(partial(after, name))
                stack.callback(hook.remove)
                if self.every:
                    hook = module.register_forward_pre_hook(partial(before, name), with_kwargs=True)
                    stack.callback(hook.remove)
            yield


def noise_like(row: Tensor, seed: int = 0) -> Tensor:
    """Another row, of the same size; the numbers of no generator of the user's."""
    with torch._C.DisableTorchFunction():  # modes refuse random numbers of the model's
        random = torch.randn(row.shape, generator=torch.Generator().manual_seed(seed)).to(row.device)
    return (random * NOISE * row.abs().mean().nan_to_num().clamp(min=1e-3)).to(row.dtype)


def _error(first: Tensor, second: Tensor, rows: Sequence[Rows]) -> Tensor | None:
    """The largest difference, of the largest value; None if it is not known where rows are."""
    pairs = [pair for each in rows for pair in each.pairs(first, second)]
    if first.shape == second.shape:
        pairs.append((first, second))  # it may have no rows: then it must not depend on any
    if not pairs:
        return None
    return torch.stack([_difference(a.float(), b.float()) for a, b in pairs]).amin()


def _difference(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().amax() / torch.maximum(a.abs().amax(), b.abs().amax()).clamp(min=1e-20)
