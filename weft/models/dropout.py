"""Dropped: a dropout of a model's, on this rank's tokens, with the numbers that one process would draw."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.models.randomness import dropout

if TYPE_CHECKING:
    from weft.models.region import Region


class Dropped:
    """What happens around the forward of an nn.Dropout: [batch, …, tokens, channels]."""

    def __init__(self, region: Region, name: str, module: nn.Dropout) -> None:
        self.region, self.name, self.module = region, name, module

    def around(self, forward: Callable[..., Any], args: Any, kwargs: Any) -> Tensor:
        x: Tensor = args[0] if args else kwargs["input"]
        shards = self.region.shards
        if not (self.module.training and self.module.p) or x.dim() < 3:
            return self.region.around(forward, args, kwargs)
        ways = {(stream,) for stream in shards.sizes} | self.region.orders
        known = [streams for streams in ways if set(streams) <= set(shards.sizes)]
        layouts = {Layout(*shards.runs(streams)) for streams in known}
        rank, tokens = shards.world.comm.rank, x.shape[-2]
        cut = set(shards.sizes.values())
        # All ranks must come to the same answer, though each has another number of tokens.
        is_shard = any(tokens == layout.rows(each) for layout in layouts for each in range(shards.ranks))
        is_whole = tokens in self.region.whole - cut or (not is_shard and tokens in cut)
        if not layouts or (is_whole and not is_shard):  # before anything is cut, or beside it
            return self.region.around(forward, args, kwargs)
        fitting = {layout for layout in layouts if layout.rows(rank) == tokens}
        if is_whole or len(fitting) != 1:
            raise InputError(
                f"{self.name} drops of {tokens} tokens; whose, weft cannot tell.",
                hint="Set its p to 0 to train without it.",
            )
        whose = {"dim": x.dim() - 2, "layout": fitting.pop(), "rank": rank}
        return self.region.around(dropout, (x, self.module.p, True), whose)


def whole_counts(given: Mapping[str, Any]) -> frozenset[int]:
    """How many tokens modules may see of inputs [batch, tokens, channels], of one or of several together."""
    counts = [x.shape[1] for x in tree_leaves(dict(given)) if isinstance(x, Tensor) and x.dim() == 3]
    return frozenset(sum(some) for n in range(1, 4) for some in combinations(counts, n))
