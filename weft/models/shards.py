"""Shards: the token streams of one forward, and which of their tokens this rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.core.errors import InputError
from weft.core.indices import split_evenly
from weft.core.layout import Runs
from weft.models.adapter import Cut, Cuts
from weft.run.opaque import callee_of, handle_of
from weft.run.switch import gather
from weft.run.transforms import check_traced
from weft.run.world import World, world_of

Counts = tuple[int, ...]
"""Tokens of each rank."""


class Shards:
    """Streams are split as evenly as can be; one that has fewer tokens than there are ranks stays whole.

    Models slice by the number of text tokens they have, and few can do without any.
    """

    answer: Callable[..., Tensor] | None = None
    """What answers attention instead, while a model is probed."""

    def __init__(self, mesh: Any = None) -> None:
        self.mesh = mesh
        self.sizes: dict[str, int] = {}
        self.handle = handle_of(self)

    @cached_property
    def world(self) -> World:
        return world_of(self.mesh, 60.0)

    @property
    def ranks(self) -> int:
        return self.world.comm.size

    def is_whole(self, stream: str) -> bool:
        return self.sizes[stream] < self.ranks

    def spans(self, stream: str) -> list[tuple[int, int]]:
        """What each rank has of a stream."""
        size = self.sizes[stream]
        return [(0, size)] * self.ranks if self.is_whole(stream) else split_evenly(size, self.ranks)

    def rows(self, streams: Sequence[str], rank: int | None = None) -> int:
        """How many tokens of some streams a rank has, by default this one."""
        at = self.world.comm.rank if rank is None else rank
        return sum(stop - start for start, stop in (self.spans(stream)[at] for stream in streams))

    def cut(self, value: Any, cuts: Cuts, what: str) -> Any:
        """This rank's part of an argument or a result."""
        if value is None or cuts is None:
            return value
        if isinstance(value, list | tuple):
            each = cuts if not isinstance(cuts, Cut) else (cuts,) * len(value)
            cut = [self.cut(item, part, what) for item, part in zip(value, each, strict=False)]
            return type(value)((*cut, *value[len(each) :]))
        if not isinstance(cuts, Cut):
            raise InputError(f"{what} is a {type(value).__name__}, where its adapter expects a tuple.")
        if cuts.dim is None:
            return self.first(cuts.stream, value)
        if cuts.ndim not in (0, value.dim()):
            return value
        if torch.compiler.is_compiling():
            comm, dim = self.world.comm, cuts.dim % value.dim()
            return _cut(self.handle, value, cuts.stream, dim, comm.rank, comm.size)
        size = value.shape[cuts.dim]
        if self.sizes.setdefault(cuts.stream, size) != size:
            raise InputError(
                f"{what} has {size} tokens of {cuts.stream}, of which there were {self.sizes[cuts.stream]}.",
                hint="All tensors that are cut by one stream must have all of its tokens.",
            )
        return self.part(value, cuts.stream, cuts.dim)

    def part(self, x: Tensor, stream: str, dim: int) -> Tensor:
        """This rank's tokens of a whole tensor."""
        start, stop = self.spans(stream)[self.world.comm.rank]
        return x.narrow(dim, start, stop - start).contiguous()

    def first(self, stream: str, count: int) -> int:
        """How many of the first tokens of a stream this rank has."""
        start, stop = self.spans(stream)[self.world.comm.rank]
        return min(max(count - start, 0), stop - start)

    def gather(self, x: Tensor, cut: Cut, what: str) -> Tensor:
        """The whole of what each rank has its part of."""
        assert cut.dim is not None
        dim = cut.dim % x.dim()
        size = self.sizes.get(cut.stream)
        if size is None:
            raise InputError(f"{what} is to be gathered, but no {cut.stream} was cut before it.")
        if self.is_whole(cut.stream):
            return x
        dims = {("tokens" if at == dim else f"dim {at}"): None for at in range(x.dim())}
        return gather(x, "tokens", dims={**dims, "tokens": size}, mesh=self.world, stage=what)

    def runs(self, streams: tuple[str, ...], text: Counts | None = None) -> tuple[int, tuple[Runs, ...]]:
        """Tokens, and each rank's runs of them, of an attention over some streams in order.

        Of the text, ranks may have only some tokens left.
        """
        runs: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        offset = 0
        for stream in streams:
            spans = self.spans(stream)
            if text is not None and stream != "video":
                spans = _parts(text, whole=self.is_whole(stream))
            for mine, (start, stop) in zip(runs, spans, strict=True):
                if stop > start:
                    mine.append((offset + start, offset + stop))
            offset += max(stop for _, stop in spans)
        return offset, tuple(tuple(mine) for mine in runs)


def _parts(counts: Counts, *, whole: bool) -> list[tuple[int, int]]:
    """One after another, or all the same."""
    ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
    return [
        (0 if whole else end - count, count if whole else end)
        for end, count in zip(ends, counts, strict=True)
    ]


@torch.library.custom_op("weft::cut", mutates_args=())
def _cut(handle: Tensor, x: Tensor, stream: str, dim: int, rank: int, ranks: int) -> Tensor:
    """Shards.cut for torch.compile: sizes are looked up when a graph runs."""
    del rank, ranks
    check_traced("A parallelized model")
    own = callee_of(handle).cut(x, Cut(stream, dim), "An argument of a compiled module")
    return own.clone() if own.untyped_storage()._cdata == x.untyped_storage()._cdata else own


@_cut.register_fake
def _(handle: Tensor, x: Tensor, stream: str, dim: int, rank: int, ranks: int) -> Tensor:
    del handle, stream
    start, stop = _span(x.shape[dim], rank, ranks)
    return x.new_empty([stop - start if at == dim else size for at, size in enumerate(x.shape)])


def _span(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """What `Shards.spans` gives a rank, of a size that may be a symbol."""
    if size < ranks:
        return 0, size
    first: Any = torch.sym_min  # of ints and symbols, whatever its annotation says
    start, stop = (at * (size // ranks) + first(at, size % ranks) for at in (rank, rank + 1))
    return start, stop


def _keep_size(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    _, x, _, ctx.dim, *ctx.place = inputs
    ctx.size, ctx.dims = x.shape[ctx.dim], x.dim()


def _uncut(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """Put the gradient of a shard among zeros."""
    start, stop = _span(ctx.size, *ctx.place)
    whole = F.pad(grad, [0, 0] * (ctx.dims - 1 - ctx.dim) + [start, ctx.size - stop])
    return None, whole, None, None, None, None


_cut.register_autograd(_uncut, setup_context=_keep_size)
