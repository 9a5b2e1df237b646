"""Mixing: before its first forward, find out whether a parallelized model computes tokens one by one.

The model runs on a few tokens of each stream, and again with noise around them; in attention each token
attends to itself alone. Then a token of the output depends on nothing but itself: a module whose tokens come
out otherwise beside others, or in other places, would be wrong on this rank's tokens, and is refused by
name. A model that cannot run on so few runs on as many as this rank has, some of them noise the second time.
"""

from __future__ import annotations

from itertools import permutations
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves

from weft.core.errors import InputError
from weft.models.adapter import Cut, modules
from weft.models.guard import Guard
from weft.models.probe import AROUND, NONE, Blamed, Rows, Trace, find_mixing, noise_like
from weft.models.shards import Shards

if TYPE_CHECKING:
    from weft.models.attend import Site
    from weft.models.region import Region

COUNTS = ((7, 5, 6), (5, 3, 4), (3, 5, 4), (2, 7, 8))
"""Tokens of each stream that is cut, and rows of noise before and behind: sizes and their sums tell streams
apart, and every token gets an even place if it had an odd one."""


class Few(Shards):
    """Tokens of the whole, the same on every rank, in place of this rank's; of short streams all."""

    def __init__(self, mesh: Any, trace: Trace, noise: int, before: Few | None = None) -> None:
        super().__init__(mesh)
        self.trace, self.kind, self.before, self.answer = trace, noise, before, self.attend
        self.gathered: list[Tensor] = []
        if before is not None:
            self.sizes = dict(before.sizes)

    def tokens(self, stream: str) -> list[int]:
        """By their places in the whole; noise has that of the first or the last."""
        last, count = self.sizes[stream] - 1, self._counts(stream)[0]
        if self.is_whole(stream):
            return list(range(last + 1))
        front, back = self.noise(stream)
        return [0] * front + [at * last // (count - 1) for at in range(count)] + [last] * back

    def noise(self, stream: str) -> tuple[int, int]:
        """Rows before and behind the others."""
        if self.is_whole(stream) or self.kind == NONE:
            return 0, 0
        _, front, back = self._counts(stream)
        return (front, back) if self.kind == AROUND else (back, front)

    def same(self, stream: str) -> tuple[int, int]:
        """The first row that is not noise, and how many are not."""
        front, back = self.noise(stream)
        return front, len(self.tokens(stream)) - front - back

    def _counts(self, stream: str) -> tuple[int, int, int]:
        return COUNTS[min(list(self.sizes).index(stream), len(COUNTS) - 1)]

    def rows(self, streams: Any, rank: int | None = None) -> int:  # noqa: ARG002 - alike on all ranks
        return sum(len(self.tokens(stream)) for stream in streams)

    def first(self, stream: str, count: int) -> int:
        return sum(token < count for token in self.tokens(stream))

    def part(self, x: Tensor, stream: str, dim: int) -> Tensor:
        if self.is_whole(stream):
            return x
        few = x.detach().index_select(dim, torch.tensor(self.tokens(stream), device=x.device))
        return self._noised(few, stream, dim)

    def _noised(self, x: Tensor, stream: str, dim: int) -> Tensor:
        """With noise; not masks and the like, which have no channels."""
        if self.kind != NONE and dim % x.dim() < x.dim() - 1 and x.is_floating_point():
            front, back = self.noise(stream)
            for rows in x.narrow(dim, 0, front), x.narrow(dim, x.shape[dim] - back, back):
                rows.copy_(noise_like(rows, seed=int(self.before is not None)))
        return x

    def gather(self, x: Tensor, cut: Cut, what: str) -> Tensor:
        """Of few tokens, as many as there are; the same in both runs, as what follows may mix them."""
        if cut.stream not in self.sizes or self.is_whole(cut.stream):
            return super().gather(x, cut, what)
        assert cut.dim is not None
        self.trace.note(self.trace.running or what, "gathered", x)
        repeated = torch.arange(self.sizes[cut.stream], device=x.device) % x.shape[cut.dim]
        whole = x.index_select(cut.dim, repeated)
        at = len(self.gathered)
        self.gathered.append(whole if self.before is None else self.before.gathered[at])
        return self.gathered[at].clone()

    def attend(self, site: Site, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Each token attends to itself alone."""
        owner = self.trace.running or site.name
        self.trace.note(owner, "scale", torch.tensor(scale or 0.0))
        if q.shape[2] == self.rows(site.streams):
            self.trace.note(owner, "attention", (q, k, v))
        elif not site.ragged:
            raise InputError(f"{site.name} attends from {q.shape[2]} tokens.")  # the forward says more
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def compared(self) -> list[Rows]:
        """The dims that tokens may be in: of one stream, or of several one after another."""
        assert self.before is not None
        cut = [stream for stream in self.sizes if not self.is_whole(stream)]
        orders = [each for n in range(1, len(self.sizes) + 1) for each in permutations(self.sizes, n)]
        rows = {self._compared(self.before, order): None for order in orders if {*order} & {*cut}}
        return [each for each in rows if all(length for *_, length in each.same)]

    def _compared(self, before: Few, order: tuple[str, ...]) -> Rows:
        runs, a, b = [], 0, 0
        for stream in order:
            (x, length), (y, _) = before.same(stream), self.same(stream)
            runs.append((a + x, b + y, length))
            a, b = a + before.rows([stream]), b + self.rows([stream])
        return Rows(a, b, tuple(runs))


class Own(Few):
    """This rank's tokens, of which about half may be noise."""

    def tokens(self, stream: str) -> list[int]:
        return list(range(*self.spans(stream)[self.world.comm.rank]))

    def noise(self, stream: str) -> tuple[int, int]:
        count = len(self.tokens(stream))
        return (0, 0) if self.is_whole(stream) or count < 2 else (-(-count // 4), count // 3)

    def part(self, x: Tensor, stream: str, dim: int) -> Tensor:
        orders = (each for n in range(1, len(self.sizes) + 1) for each in permutations(self.sizes, n))
        self.trace.whole.update(count for count in map(self.rows, orders) if count > 1)
        return self._noised(Shards.part(self, x.detach(), stream, dim).clone(), stream, dim)


def refuse_mixing(region: Region, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on all ranks if the model mixes tokens outside of what its adapter declares."""
    values = tree_leaves((args, kwargs, next(region.model.parameters(), None)))
    # Fake tensors and those of torch.func have nothing to compare.
    if detect_fake_mode(values) or torch._C._functorch.peek_interpreter_stack() is not None:  # pyright: ignore
        return
    runs = _Runs(region, args, kwargs)
    found = find_mixing(region.model, [region.shards.world.comm], [runs.few, runs.own])
    if found is not None:
        (name, _), cause = found
        kind = f" ({type(modules(region.model)[name]).__name__})" if name else ""
        # Where a module leaves out padding, tokens that follow it move to its places.
        drops_padding = any(streams.endswith("?") for streams in region.adapter.attention.values())
        raise InputError(
            f"{name or type(region.model).__name__}{kind} computes a token from {cause.format('tokens')}, "
            "where each rank has only its part of them.",
            hint=("Pad texts at their ends. " if drops_padding else "")
            + "Declare it in the adapter: under attention, or under local if its keys are whole. Else "
            "gather before it and cut after it; positions are made for the whole and cut (inputs, outputs).",
        )


class _Runs:
    """Two runs of a model that are compared."""

    def __init__(self, region: Region, args: Any, kwargs: Any) -> None:
        self.region, self.given = region, (args, kwargs)

    def few(self, trace: Trace, *noise: int) -> Blamed | None:
        return self._compared(Few, trace, noise)

    def own(self, trace: Trace, *noise: int) -> Blamed | None:
        return self._compared(Own, trace, noise)

    def _compared(self, kind: type[Few], trace: Trace, noise: tuple[int, ...]) -> Blamed | None:
        first = kind(self.region.shards.mesh, trace, noise[0])
        self._run(first, [])
        second = kind(self.region.shards.mesh, trace, noise[1], first)
        if not (rows := second.compared()):
            return None
        second.sizes = {}  # nothing is cut yet
        self._run(second, rows)
        return trace.blamed()

    def _run(self, shards: Few, rows: list[Rows]) -> None:
        region, (args, kwargs) = self.region, self.given
        own = region.shards, region.active
        region.shards, region.active = shards, True
        try:
            with Guard(region):  # what draws random numbers is refused as such
                shards.trace.run(lambda: region._enter.around(region.forward, args, kwargs), rows)
        finally:
            region.shards, region.active = own
