"""Before its first forward, find out whether a parallelized model computes tokens one by one.

The model runs on a few tokens of each stream, and again with noise around them; in attention each token
attends to itself alone. Then a token of the output depends on nothing but itself: a module whose tokens
differ beside others, or at other positions, would be wrong on this rank's tokens, and is named in an error.
A model that cannot run on so few runs on as many as this rank has, some of them noise the second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.diffusers.adapter import Shard
from weft.diffusers.shards import TokenShards
from weft.hooks.module_tree import modules
from weft.hooks.probe import NONE, ProbeRows, RowSpans, Trace, cannot_compare, find_mixing
from weft.hooks.rng import RandomGuard
from weft.hooks.wrap import Args, Kwargs
from weft.run.world import MeshLike

if TYPE_CHECKING:
    from weft.diffusers.attention_hook import AttentionHook
    from weft.diffusers.region import ShardedRegion

COUNTS = ((7, 5, 6), (5, 3, 4), (3, 5, 4), (2, 7, 8))
"""Tokens of each stream that is split, and rows of noise before and behind: sizes and their sums are unique
to streams, and every token gets an even position if it had an odd one."""


class ProbeTokens(TokenShards):
    """Few tokens of the whole, the same on every rank, or this rank's own; of short streams all."""

    def __init__(
        self, mesh: MeshLike, trace: Trace, noise: int, *, own: bool, before: ProbeTokens | None = None
    ) -> None:
        super().__init__(mesh)
        self.trace, self.noise, self.own, self.before = trace, noise, own, before
        self.probe_attention = self.attend
        self.gathered: list[Tensor] = []

    def picked(self, stream: str) -> ProbeRows:
        """Return the tokens of a stream; noise has the position of the first or the last."""
        if self.is_replicated(stream):
            return ProbeRows(range(self.sizes[stream]))
        counts = COUNTS[min(list(self.sizes).index(stream), len(COUNTS) - 1)]
        span = self.spans(stream)[self.world.comm.rank]
        return ProbeRows.of(self.sizes[stream], span, self.noise, counts, own=self.own)

    def orders(self) -> list[tuple[str, ...]]:
        """Return the streams, one alone or several one after another, in every order."""
        return [each for n in range(1, len(self.sizes) + 1) for each in permutations(self.sizes, n)]

    def rows(self, streams: Sequence[str], rank: int | None = None) -> int:  # noqa: ARG002 - equal on all ranks
        return sum(len(self.picked(stream).indices) for stream in streams if stream in self.sizes)

    def first(self, stream: str, count: int) -> int:
        return sum(token < count for token in self.picked(stream).indices)

    def shard(self, x: Tensor, stream: str, dim: int) -> Tensor:
        if self.own:
            self.trace.complete_sizes.update(count for count in map(self.rows, self.orders()) if count > 1)
        elif self.is_replicated(stream):
            return x
        # Masks and the like, which have no channels, get no noise.
        is_noisy = self.noise != NONE and dim % x.dim() < x.dim() - 1 and x.is_floating_point()
        return self.picked(stream).pick(x, dim, seed=int(self.before is not None) if is_noisy else None)

    def gather(self, x: Tensor, spec: Shard, name: str) -> Tensor:
        """Repeat the probe's tokens to the full number; both runs use the tokens of the first."""
        if spec.stream not in self.sizes or self.is_replicated(spec.stream):
            return super().gather(x, spec, name)
        assert spec.dim is not None
        self.trace.record(self.trace.running or name, "gathered", x)
        repeated = torch.arange(self.sizes[spec.stream], device=x.device) % x.shape[spec.dim]
        full = x.index_select(spec.dim, repeated)
        at = len(self.gathered)
        self.gathered.append(full if self.before is None else self.before.gathered[at])
        return self.gathered[at].clone()

    def attend(self, hook: AttentionHook, q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
        """Let each token attend to itself alone."""
        owner = self.trace.running or hook.name
        self.trace.record(owner, "scale", torch.tensor(scale or 0.0))
        if q.shape[2] == self.rows(hook.streams):
            self.trace.record(owner, "attention", (q, k, v))
        elif not hook.drops_padding:
            raise InputError(
                f"{hook.name} attends from {q.shape[2]} tokens."
            )  # the forward's error is better
        if not hook.is_self:
            return q[..., :1].expand(*q.shape[:3], v.shape[3])
        return v.repeat_interleave(q.shape[1] // v.shape[1], 1)

    def compared(self, before: ProbeTokens) -> list[RowSpans]:
        """Return the dims that tokens may be in: of one stream, or of several one after another."""
        self.sizes = before.sizes
        split = {stream for stream in self.sizes if not self.is_replicated(stream)}
        rows = {self._compared(before, order): None for order in self.orders() if split & {*order}}
        self.sizes = {}  # nothing is split yet
        return [each for each in rows if all(length for *_, length in each.same)]

    def _compared(self, before: ProbeTokens, order: tuple[str, ...]) -> RowSpans:
        spans, a, b = [], 0, 0
        for stream in order:
            first, second = before.picked(stream), self.picked(stream)
            spans.append((a + first.front, b + second.front, first.same))
            a, b = a + len(first.indices), b + len(second.indices)
        return RowSpans(a, b, tuple(spans))


def check_mixing(region: ShardedRegion, args: Args, kwargs: Kwargs) -> InputError | None:
    """Raise on all ranks if the model mixes tokens outside of what its adapter declares.

    Return the error to raise if its forward can run, but was not probed.
    """
    if cannot_compare((args, kwargs, next(region.model.parameters(), None))):
        return None
    mesh = region.shards.mesh

    def run(trace: Trace, noise: int, own: bool, first: ProbeTokens | None) -> ProbeTokens:  # noqa: FBT001
        shards = ProbeTokens(mesh, trace, noise, own=own, before=first)
        shards.grid = region.shards.grid
        rows = None if first is None else shards.compared(first)
        before = region.shards, region.active
        region.shards, region.active = shards, True
        try:
            with RandomGuard(region.random_error):  # functions that draw random numbers raise their own error
                trace.run(lambda: region.enter.around(region.forward, args, kwargs), rows)
        finally:
            region.shards, region.active = before
        return shards

    mixing = find_mixing(region.model, [region.shards.world.comm], run)
    if mixing is None or isinstance(mixing, InputError):
        return mixing
    (name, _), cause = mixing
    kind = f" ({type(modules(region.model)[name]).__name__})" if name else ""
    # Where a module leaves out padding, tokens that follow it move to its positions.
    drops_padding = any(streams.endswith("?") for streams in region.adapter.attention.values())
    raise InputError(
        f"{name or type(region.model).__name__}{kind} computes a token from {cause.format('tokens')}, "
        "where each rank has only its part of them.",
        hint=("Pad texts at their ends. " if drops_padding else "")
        + "Declare it in the adapter: under attention, or under local if its keys are whole. Else "
        "gather before it and split after it; positions are made for the whole and split (inputs, "
        "outputs).",
    )
