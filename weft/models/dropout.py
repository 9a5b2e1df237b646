"""Dropped: a dropout of a model's, on this rank's tokens, with the numbers that one process would draw."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

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
        rank = shards.world.comm.rank
        fitting = {layout for layout in layouts if layout.rows(rank) == x.shape[-2]}
        if not fitting and all(x.shape[-2] == layout.size or layout.size == 0 for layout in layouts):
            return self.region.around(forward, args, kwargs)  # before anything is cut
        if len(fitting) != 1:
            raise InputError(
                f"{self.name} drops of {x.shape[-2]} tokens; whose, weft cannot tell.",
                hint="Set its p to 0 to train without it.",
            )
        whose = {"dim": x.dim() - 2, "layout": fitting.pop(), "rank": rank}
        return self.region.around(dropout, (x, self.module.p, True), whose)
