"""ModuleHook: runs the forward of one module of a sharded model; DropoutHook: of an nn.Dropout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations, zip_longest
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.utils._pytree import PyTree, tree_leaves

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.diffusers.adapter import GatherSpec, ShardSpec
from weft.hooks.input_check import is_recomputing
from weft.hooks.rng import sharded_dropout
from weft.hooks.wrap import Args, Forward, ForwardWrapper, Kwargs

if TYPE_CHECKING:
    from weft.diffusers.attention_hook import AttentionHook
    from weft.diffusers.region import ShardedRegion


class ModuleHook(ForwardWrapper):
    """Split the arguments, run the module (as an attention or a dropout), split or gather its output.

    what   name for errors, equal for all modules of one pattern, so that torch.compile compiles one graph.
    """

    def __init__(self, region: ShardedRegion, what: str) -> None:
        self.region, self.what = region, what
        self.inner: AttentionHook | DropoutHook | ShardedRegion | None = None
        """What runs the module; the region itself, if its keys are replicated."""
        self.order: Sequence[str] = ()
        """The names of the module's arguments."""
        self.inputs: Mapping[str, ShardSpec] = {}
        self.output: ShardSpec = None
        self.gather: GatherSpec | None = None

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        region = self.region
        if not region.active and not is_recomputing():  # called alone, by the user: on all tokens
            return forward(*args, **kwargs)
        if self.inputs:
            args, kwargs = self._split(args, kwargs)
        out = forward(*args, **kwargs) if self.inner is None else self.inner.around(forward, args, kwargs)
        if self.output is not None:
            out = region.shards.split(out, self.output, f"The output of {self.what}")
        if self.gather is not None:
            out = region.shards.gather_all(out, self.gather, f"The output of {self.what}")
            region.restore_in_backward(out)
        return out

    def _split(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        shards, specs = self.region.shards, self.inputs
        named = [*zip_longest(self.order[: len(args)], args, fillvalue=""), *kwargs.items()]
        own = [shards.split(value, specs.get(name), f"{name} of {self.what}") for name, value in named]
        return tuple(own[: len(args)]), dict(zip(kwargs, own[len(args) :], strict=True))


class DropoutHook:
    """Runs an nn.Dropout of [batch, …, tokens, channels] with the random numbers of one process."""

    def __init__(self, region: ShardedRegion, name: str, module: nn.Dropout) -> None:
        self.region, self.name, self.module = region, name, module

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> Tensor:
        x: Tensor = args[0] if args else kwargs["input"]
        layout = self._layout(x)
        if layout is None:
            return self.region.around(forward, args, kwargs)
        shard = {"dim": x.dim() - 2, "layout": layout, "rank": self.region.shards.world.comm.rank}
        return self.region.around(sharded_dropout, (x, self.module.p, True), shard)

    def _layout(self, x: Tensor) -> Layout | None:
        """Return the layout of the tokens; None if nothing is dropped, or the tensor is no shard."""
        shards = self.region.shards
        if not (self.module.training and self.module.p) or x.dim() < 3:
            return None
        orders = {(stream,) for stream in shards.sizes} | self.region.orders
        known = [streams for streams in orders if set(streams) <= set(shards.sizes)]
        layouts = {Layout(*shards.runs(streams)) for streams in known}
        rank, tokens = shards.world.comm.rank, x.shape[-2]
        split = set(shards.sizes.values())
        # All ranks must decide alike, though their numbers of tokens differ.
        is_shard = any(tokens == layout.rows(each) for layout in layouts for each in range(shards.ranks))
        is_full = tokens in self.region.full_sizes - split or (not is_shard and tokens in split)
        if not layouts or (is_full and not is_shard):  # before anything is split, or beside it
            return None
        fitting = {layout for layout in layouts if layout.rows(rank) == tokens}
        if is_full or len(fitting) != 1:
            raise InputError(
                f"{self.name}: dropout of {tokens} tokens, which may be those of several streams.",
                hint="Set its p to 0 to train without it.",
            )
        return fitting.pop()


def full_sizes(arguments: Mapping[str, PyTree]) -> frozenset[int]:
    """Return the numbers of tokens of inputs [batch, tokens, channels], of one or of several together."""
    counts = [x.shape[1] for x in tree_leaves(dict(arguments)) if isinstance(x, Tensor) and x.dim() == 3]
    return frozenset(sum(some) for n in range(1, 4) for some in combinations(counts, n))
