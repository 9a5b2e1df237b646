"""Stream: the tensor that runs through the stages of a model, and how this rank's part of it is laid out."""

from __future__ import annotations

from math import prod
from typing import Any

from torch import Tensor

from weft.core.errors import InputError
from weft.core.indices import split_evenly
from weft.models.sites import Site
from weft.plan.stages import WHOLE, Move, State
from weft.run.switch import gather, split, switch
from weft.run.world import World


class Stream:
    """Dims in order, one world for each axis that shards one of them, and the sizes of the whole."""

    def __init__(self, dims: list[str], worlds: tuple[World, ...]) -> None:
        self.dims, self.worlds = dims, worlds
        self.whole: State = (WHOLE,) * len(worlds)
        self.layout = self.whole
        self.sizes: dict[str, int] = {}

    def measure(self, site: Site, x: Tensor, known: dict[str, int]) -> None:
        """Take the sizes from a whole tensor; of dims that are one in it, all but one must be known."""
        if x.dim() != len(site.groups):
            raise InputError(
                f"Stage {site.name} got a tensor of shape {list(x.shape)}.",
                hint=f"Its dims were declared to be {site}.",
            )
        sizes = dict(known)
        for group, size in sorted(zip(site.groups, x.shape, strict=True), key=lambda item: len(item[0])):
            unknown = [dim for dim in group if dim not in sizes]
            if len(unknown) > 1:
                raise InputError(
                    f"Stage {site.name} has {', '.join(unknown)} in one dim, so their sizes are not known.",
                    hint=f"Tell one of them: weft.stages(…).sizes[{unknown[0]!r}] = …",
                )
            rest = max(1, prod(sizes[dim] for dim in group if dim in sizes))
            sizes |= {dim: size // rest for dim in unknown}
        self.sizes = {dim: sizes[dim] for dim in self.dims}

    def local(self, layout: State) -> dict[str, int]:
        """Sizes of this rank's part."""
        sizes = dict(self.sizes)
        for dim, world in zip(layout, self.worlds, strict=True):
            if dim != WHOLE:
                start, stop = split_evenly(sizes[dim], world.comm.size)[world.comm.rank]
                sizes[dim] = stop - start
        return sizes

    def apart(self, site: Site, x: Tensor) -> Tensor:
        """A stage's tensor with each dim by itself; its shape must be what the layout says."""
        sizes = self.local(self.layout)
        wanted = [prod(sizes[dim] for dim in group) for group in site.groups]
        if list(x.shape) != wanted:
            raise InputError(
                f"Stage {site.name} has a tensor of shape {list(x.shape)}; sharded by "
                f"{' × '.join(self.layout)}, this rank's part of {site} is {wanted}.",
                hint="Between stages nothing may change the shape, or need the whole tensor.",
            )
        order = site.order
        return x.reshape([sizes[dim] for dim in order]).permute([order.index(dim) for dim in self.dims])

    def together(self, site: Site, x: Tensor) -> Tensor:
        sizes = dict(zip(self.dims, x.shape, strict=True))
        x = x.permute([self.dims.index(dim) for dim in site.order])
        return x.reshape([prod(sizes[dim] for dim in group) for group in site.groups])

    def move(self, x: Tensor, moves: tuple[Move, ...], stage: str) -> Tensor:
        for move in moves:
            others = {dim for axis, dim in enumerate(self.layout) if axis != move.axis}
            options: dict[str, Any] = {
                "dims": {dim: None if dim in others else size for dim, size in self.sizes.items()},
                "mesh": self.worlds[move.axis],
                "stage": stage,
            }
            if move.verb == "split":
                x = split(x, move.target, **options)
            elif move.verb == "gather":
                x = gather(x, move.source, **options)
            else:
                x = switch(x, move.source, move.target, **options)
            self.layout = (*self.layout[: move.axis], move.target, *self.layout[move.axis + 1 :])
        return x
