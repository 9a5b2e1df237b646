"""TokenShards: the token streams of one forward, and which of their tokens this rank has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.core.indices import split_evenly
from weft.core.layout import Runs
from weft.core.voxels import Extent
from weft.diffusers.adapter import GatherSpec, Shard, ShardSpec, Whole
from weft.run.opaque import callee_of, handle_of
from weft.run.switch import gather
from weft.run.transforms import check_traced
from weft.run.world import MeshLike, World, world_of

Counts = tuple[int, ...]
"""Tokens of each rank."""


class TokenShards:
    """Streams are split as evenly as possible; one that has fewer tokens than there are ranks is replicated.

    Models slice by the number of text tokens they have, and few can do without any.
    """

    probe_attention: Callable[..., Tensor] | None = None
    """What computes attention instead while a model is probed."""

    def __init__(self, mesh: MeshLike = None) -> None:
        self.mesh = mesh
        self.sizes: dict[str, int] = {}
        """Tokens of each stream, once it was split; of a stream that a forward does not have, none."""
        self.grid: Callable[[], Extent] | None = None
        """Of the video, which says how many of the tokens in one tensor are its."""
        self.handle = handle_of(self)

    @cached_property
    def world(self) -> World:
        return world_of(self.mesh, 60.0)

    @property
    def ranks(self) -> int:
        return self.world.comm.size

    def is_replicated(self, stream: str) -> bool:
        return self.sizes.get(stream, 0) < self.ranks

    def spans(self, stream: str) -> list[tuple[int, int]]:
        """Return each rank's tokens of a stream."""
        size = self.sizes.get(stream, 0)
        return [(0, size)] * self.ranks if self.is_replicated(stream) else split_evenly(size, self.ranks)

    def rows(self, streams: Sequence[str], rank: int | None = None) -> int:
        """Return how many tokens of some streams a rank has, by default this one."""
        at = self.world.comm.rank if rank is None else rank
        return sum(stop - start for start, stop in (self.spans(stream)[at] for stream in streams))

    def split(self, value: PyTree, spec: ShardSpec, name: str) -> PyTree:
        """Return this rank's shard of an argument or a result."""
        if value is None or spec is None:
            return value
        if isinstance(spec, Whole):
            return self.gather(value, Shard(*spec), name)
        if isinstance(value, dict):
            return {key: self.split(item, spec, name) for key, item in value.items()}
        if isinstance(value, list | tuple):
            each = spec if not isinstance(spec, Shard) else (spec,) * len(value)
            shards = [self.split(item, own, name) for item, own in zip(value, each, strict=False)]
            return type(value)((*shards, *value[len(each) :]))
        if not isinstance(spec, Shard):
            raise InputError(f"{name} is a {type(value).__name__}, where its adapter expects a tuple.")
        if spec.dim is None:
            return self.last(spec.stream, value) if spec.last else self.first(spec.stream, value)
        return value if spec.ndim not in (0, value.dim()) else self._split(value, spec.stream, spec.dim, name)

    def _split(self, x: Tensor, stream: str, dim: int, name: str) -> Tensor:
        if " " in stream:
            return self._split_several(x, stream.split(), dim, name)
        if torch.compiler.is_compiling():
            comm = self.world.comm
            return _split(self.handle, x, stream, dim % x.dim(), comm.rank, comm.size)
        size = x.shape[dim]
        if size == 1:  # of one token for all, or of all that there is
            self.sizes.setdefault(stream, 1)
            return x
        if self.sizes.setdefault(stream, size) != size:
            raise InputError(
                f"{name} has {size} tokens of {stream}, of which there were {self.sizes[stream]}.",
                hint="All tensors that are split by one stream must have all of its tokens.",
            )
        return self.shard(x, stream, dim)

    def _split_several(self, x: Tensor, streams: list[str], dim: int, name: str) -> Tensor:
        """Return this rank's shards of streams one after another, of which one may be new."""
        if "video" not in self.sizes and self.grid is not None:
            self.sizes["video"] = prod(self.grid())
        size, known = x.shape[dim], sum(self.sizes.get(stream, 0) for stream in streams)
        new = [stream for stream in streams if stream not in self.sizes]
        if len(new) == 1 and size >= known:
            self.sizes[new[0]] = size - known
        elif new or size != known:
            raise InputError(
                f"{name} has {size} tokens of {' and '.join(streams)}, of which there were {known}."
            )
        parts = x.split([self.sizes[stream] for stream in streams], dim)
        return torch.cat([self.shard(own, each, dim) for own, each in zip(parts, streams, strict=True)], dim)

    # Sizes of streams are no symbols of a graph.
    vars(_split_several)["_torchdynamo_disable"] = True

    def shard(self, x: Tensor, stream: str, dim: int) -> Tensor:
        """Return this rank's tokens of a full tensor."""
        start, stop = self.spans(stream)[self.world.comm.rank]
        return x.narrow(dim, start, stop - start).contiguous()

    def first(self, stream: str, count: int) -> int:
        """Return how many of the first tokens of a stream this rank has."""
        start, stop = self.spans(stream)[self.world.comm.rank]
        return min(max(count - start, 0), stop - start)

    def last(self, stream: str, count: int) -> int:
        """Return how many of the last tokens of a stream this rank has."""
        return self.rows([stream]) - self.first(stream, self.sizes[stream] - count)

    def gather_all(self, value: PyTree, spec: GatherSpec, name: str) -> PyTree:
        """Return the full output of a module, of which each rank has a shard; of a tuple, each item."""
        if isinstance(spec, Shard):
            return self.gather(value, spec, name)
        items = zip(value, spec, strict=True)
        return type(value)(
            item if own is None or item is None else self.gather(item, own, name) for item, own in items
        )

    def gather(self, x: Tensor, spec: Shard, name: str) -> Tensor:
        """Return the full tensor, of which each rank has a shard."""
        assert spec.dim is not None
        if " " in spec.stream:
            return self._gather_several(x, spec.stream.split(), spec.dim, name)
        dim = spec.dim % x.dim()
        size = self.sizes.get(spec.stream)
        if size is None:
            raise InputError(f"{name} is to be gathered, but no {spec.stream} was split before it.")
        if self.is_replicated(spec.stream):
            return x
        dims = {("tokens" if at == dim else f"dim {at}"): None for at in range(x.dim())}
        return gather(x, "tokens", dims={**dims, "tokens": size}, mesh=self.world, stage=name)

    def _gather_several(self, x: Tensor, streams: Sequence[str], dim: int, name: str) -> Tensor:
        """Return all tokens of streams one after another."""
        parts = x.split([self.rows([stream]) for stream in streams], dim)
        present = [(own, each) for own, each in zip(parts, streams, strict=True) if each in self.sizes]
        return torch.cat([self.gather(own, Shard(each, dim), name) for own, each in present], dim)

    def runs(self, streams: tuple[str, ...], text: Counts | None = None) -> tuple[int, tuple[Runs, ...]]:
        """Return the number of tokens, and each rank's runs of them, of an attention over streams in order.

        text   how many tokens of the text each rank has left, if not all.
        """
        runs: list[list[tuple[int, int]]] = [[] for _ in range(self.ranks)]
        offset = 0
        for stream in streams:
            spans = self.spans(stream)
            if text is not None and stream != "video":
                spans = _spans(text, replicated=self.is_replicated(stream))
            for own, (start, stop) in zip(runs, spans, strict=True):
                if stop > start:
                    own.append((offset + start, offset + stop))
            offset += max(stop for _, stop in spans)
        return offset, tuple(map(tuple, runs))


def _spans(counts: Counts, *, replicated: bool) -> list[tuple[int, int]]:
    """Return one span after another, or all from 0."""
    ends = [sum(counts[: rank + 1]) for rank in range(len(counts))]
    return [
        (0 if replicated else end - count, count if replicated else end)
        for end, count in zip(ends, counts, strict=True)
    ]


@torch.library.custom_op("weft::split_tokens", mutates_args=())
def _split(handle: Tensor, x: Tensor, stream: str, dim: int, rank: int, ranks: int) -> Tensor:
    """TokenShards.split for torch.compile: sizes are looked up when a graph runs."""
    del rank, ranks
    check_traced("A parallelized model")
    own = callee_of(handle).split(x, Shard(stream, dim), "An argument of a compiled module")
    return own.clone() if own.untyped_storage()._cdata == x.untyped_storage()._cdata else own


@_split.register_fake
def _(handle: Tensor, x: Tensor, stream: str, dim: int, rank: int, ranks: int) -> Tensor:
    del handle, stream
    start, stop = _span(x.shape[dim], rank, ranks)
    return x.new_empty([stop - start if at == dim else size for at, size in enumerate(x.shape)])


def _span(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return a rank's entry of `TokenShards.spans`, for a size that may be symbolic."""
    if size < ranks:
        return 0, size
    first: Callable[[int, int], int] = torch.sym_min  # pyright: ignore - of ints and symbols
    start, stop = (at * (size // ranks) + first(at, size % ranks) for at in (rank, rank + 1))
    return start, stop


class _SplitContext(Protocol):
    """What the backward of a split needs."""

    dim: int
    size: int
    dims: int
    place: list[int]


def _save_sizes(ctx: _SplitContext, inputs: tuple[PyTree, ...], output: Tensor) -> None:
    del output
    _, x, _, ctx.dim, *ctx.place = inputs
    ctx.size, ctx.dims = x.shape[ctx.dim], x.dim()


def _split_backward(ctx: _SplitContext, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Pad the gradient of a shard with zeros."""
    start, stop = _span(ctx.size, *ctx.place)
    full = F.pad(grad, [0, 0] * (ctx.dims - 1 - ctx.dim) + [start, ctx.size - stop])
    return None, full, None, None, None, None


_split.register_autograd(_split_backward, setup_context=_save_sizes)
