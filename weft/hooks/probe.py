"""Probe: run a model twice on few rows of a dim, and find where a row depends on more than itself.

The second run has rows of noise before and behind the same rows. Modules that compute each row by itself
give the same rows again; modules that mix rows, count them, or use their positions do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode
from torch.utils._pytree import PyTree, tree_leaves

from weft.core.errors import InputError
from weft.hooks.isolation import isolated
from weft.hooks.module_tree import modules
from weft.hooks.wrap import Args, Kwargs
from weft.run.comm import Comm

NOISE_SCALE = 3.0
"""Standard deviation of noise, relative to the mean of the row that it replaces: little mixing shows too."""
MAX_SAMPLES = 64
"""Number of elements that are compared along a longer dim."""
NONE, AROUND, MOVED = range(3)
"""Noise: so many rows before and so many behind the others, or the other way round."""
CAUSES = (
    (AROUND, AROUND, "other {}"),
    (AROUND, MOVED, "its place among this rank's {}"),
    (NONE, AROUND, "the number of this rank's {}"),
)
"""What a row depends on, if two runs differ: with other noise, other positions, or more rows."""
FINE, FAILED, MIXES = range(3)


class MixedRows(NamedTuple):
    """The name of a module whose rows depend on each other, and the dim of the rows."""

    module: str
    dim: str


R = TypeVar("R")
ProbeRun = Callable[["Trace", int, bool, R | None], R]
"""(trace, noise, own, first) -> a run of the model on few rows, or on this rank's own, traced.

`first` is the run that this one is compared with, if it is the second.
"""


def find_mixing(
    model: nn.Module, comms: Sequence[Comm], run: ProbeRun[R]
) -> tuple[MixedRows, str] | InputError | None:
    """Return the module whose rows depend on other data, and on which; the same on all ranks.

    A model that cannot run on few rows is probed on those that each rank has. If it cannot run on these
    either, return the error to raise in case its forward can run.
    """

    def worst(outcome: int) -> int:
        for comm in comms:
            outcome = max(each for (each,) in comm.all_gather_ints([outcome]))
        return outcome

    failure: Exception | None = None
    for own in (False, True):
        try:
            outcome = FINE if _mixed(run, Trace(model), NONE, AROUND, own=own) is None else MIXES
        except Exception as error:  # noqa: BLE001 - whatever a model may raise for other sizes
            outcome, failure = FAILED, error
        outcome = worst(outcome)
        if outcome == MIXES:  # on some rank; more runs show the cause, or that it was rounding
            mixing = _explained(model, run, own=own)
            if worst(FINE if mixing is None else MIXES) == MIXES:
                return mixing or (MixedRows("", ""), "other {}, as another rank found")
            return None
        if outcome == FINE:
            return None
    # A forward that cannot run either raises an error of its own, with more details.
    return InputError(
        f"{type(model).__name__} could not be probed for modules that mix tokens: "
        f"{failure or 'it failed on another rank'}",
        hint="Its forward must run without side effects, on as many tokens as a rank has.",
    )


def _mixed(run: ProbeRun[R], trace: Trace, first: int, second: int, *, own: bool) -> MixedRows | None:
    run(trace, second, own, run(trace, first, own, None))
    return trace.first_mixed()


def _explained(model: nn.Module, run: ProbeRun[R], *, own: bool) -> tuple[MixedRows, str] | None:
    for first, second, cause in CAUSES:
        trace = Trace(model, every=True)
        trace.limit *= 8 if first == NONE else 1  # rounding differs with the number of rows
        if (rows := _mixed(run, trace, first, second, own=own)) is not None:
            return rows, cause
    return None


def cannot_compare(values: PyTree) -> bool:
    """Return whether tensors have no values to compare: fake ones, and those of torch.func."""
    stack = torch._C._functorch.peek_interpreter_stack()  # pyright: ignore
    return bool(detect_fake_mode(tree_leaves(values))) or stack is not None


class RowSpans(NamedTuple):
    """One dim in both runs: its sizes, and spans (start, start, length) of the rows that both have."""

    first: int
    second: int
    same: tuple[tuple[int, int, int], ...]

    def pairs(self, x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the rows of two tensors that must be the same, for each dim that may be this one."""
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
    """Records the outputs of a model's modules in a first run, and by how much those of a second differ."""

    def __init__(self, model: nn.Module, *, every: bool = False) -> None:
        self.model = model
        self.dim = ""
        """The dim of the rows, where a model has several."""
        self.every = every
        """Whether inputs and outputs of all modules are compared, or only outputs of the innermost ones."""
        self.rows: list[RowSpans] = []
        """Of the second run: the dims that its rows may be in."""
        self.complete_sizes: set[int] = set()
        """Sizes of dims of which all rows are compared, however many."""
        self.limit = 1 / 8
        """Times the root of the rounding error: smaller differences count as rounding."""
        self.errors: dict[tuple[str, str, int], tuple[str, Tensor]] = {}
        self._first: dict[tuple[str, str, int], Tensor] = {}
        self._count: Counter[tuple[str, str]] = Counter()
        self._running: list[str] = []
        self._eps = torch.finfo(torch.float32).eps

    def run(self, forward: Callable[[], PyTree], rows: Sequence[RowSpans] | None = None) -> None:
        """Record the first run, or compare the second with it, unless both have no rows in common."""
        self.rows = list(rows or ())
        self._count.clear()
        self.errors.clear()
        self._running = []
        if rows is not None and not rows:
            return
        with isolated(self.model), self._hooked():
            forward()

    @property
    def running(self) -> str:
        """The innermost module that runs, as far as modules are followed."""
        return self._running[-1] if self._running else ""

    def record(self, owner: str, kind: str, value: PyTree) -> None:
        """Record or compare what a module has computed."""
        for x in tree_leaves(value):
            if not isinstance(x, Tensor) or not (x.is_floating_point() or x.is_complex()) or not x.numel():
                continue
            key = owner, kind, self._count[owner, kind]
            self._count[owner, kind] += 1
            x = self._sampled(torch.view_as_real(x) if x.is_complex() else x)
            if x.element_size() > 1:
                self._eps = max(self._eps, torch.finfo(x.dtype).eps)
            if not self.rows:
                self._first[key] = x.clone()
            elif (first := self._first.get(key)) is not None:
                error = _error(first, x, self.rows)
                self.errors |= {} if error is None else {key: (self.dim, error)}

    def _sampled(self, x: Tensor) -> Tensor:
        """Return some elements of each long dim that is not the rows'."""
        complete = [any(not size % n for n in self.complete_sizes) for size in x.shape]
        steps = [1 if all_ else -(-size // MAX_SAMPLES) for size, all_ in zip(x.shape, complete, strict=True)]
        return x.detach()[tuple(slice(None, None, step) for step in steps)]

    def first_mixed(self) -> MixedRows | None:
        """Return the first module whose rows differed between the runs."""
        limit = self._eps**0.5 * self.limit
        errors = torch.stack([error for _, error in self.errors.values()]).tolist() if self.errors else []
        for ((owner, *_), (dim, _)), error in zip(self.errors.items(), errors, strict=True):
            if error > limit:
                return MixedRows(owner, dim)
        return None

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        def before(name: str, _: nn.Module, args: Args, kwargs: Kwargs) -> None:
            self.record(self.running, f"the input of {name}", (args, kwargs))
            self._running.append(name)

        def after(name: str, _: nn.Module, __: Args, out: PyTree) -> None:
            self.record(name, "output", out)
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


class ProbeRows(NamedTuple):
    """The rows of a dim in one run: indices into the whole dim, of which the first and last become noise."""

    indices: Sequence[int]
    front: int = 0
    back: int = 0

    @staticmethod
    def of(
        size: int, span: tuple[int, int], noise: int, few: tuple[int, int, int], *, own: bool
    ) -> ProbeRows:
        """Return a rank's own rows, its span; or few: so many of the whole, with noise before and behind."""
        if own:
            count = span[1] - span[0]
            return ProbeRows(range(*span), *((-(-count // 4), count // 3) if count > 1 else (0, 0)))
        count, front, back = few
        front, back = {NONE: (0, 0), AROUND: (front, back)}.get(noise, (back, front))
        middle = [at * (size - 1) // max(count - 1, 1) for at in range(count)]
        return ProbeRows([0] * front + middle + [size - 1] * back, front, back)

    @property
    def same(self) -> int:
        """How many rows are not noise."""
        return len(self.indices) - self.front - self.back

    def pick(self, x: Tensor, dim: int, *, seed: int | None) -> Tensor:
        """Return these rows of a whole tensor, the first and last replaced by noise if there is a seed."""
        x = x.detach().index_select(dim, torch.tensor([*self.indices], device=x.device))
        if seed is not None:
            for rows in x.narrow(dim, 0, self.front), x.narrow(dim, x.shape[dim] - self.back, self.back):
                rows.copy_(noise_like(rows, seed))
        return x


def noise_like(row: Tensor, seed: int = 0) -> Tensor:
    """Return noise of the size of a row, drawn from no generator of the user's."""
    with torch._C.DisableTorchFunction():  # modes raise for random numbers of the model's
        random = torch.randn(row.shape, generator=torch.Generator().manual_seed(seed)).to(row.device)
    return (random * NOISE_SCALE * row.abs().mean().nan_to_num().clamp(min=1e-3)).to(row.dtype)


def _error(first: Tensor, second: Tensor, rows: Sequence[RowSpans]) -> Tensor | None:
    """Return the largest difference, relative to the largest value; None if the rows' dim is not known."""
    pairs = [pair for each in rows for pair in each.pairs(first, second)]
    if first.shape == second.shape:
        pairs.append((first, second))  # the output may have no rows; it must then be equal in both runs
    if not pairs:
        return None
    return torch.stack([_difference(a.float(), b.float()) for a, b in pairs]).amin()


def _difference(a: Tensor, b: Tensor) -> Tensor:
    return (a - b).abs().amax() / torch.maximum(a.abs().amax(), b.abs().amax()).clamp(min=1e-20)
