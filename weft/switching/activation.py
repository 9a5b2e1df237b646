"""ShardedActivation: the tensor that passes through the stages of a model, and its placement on the ranks."""

from __future__ import annotations

from math import prod

from torch import Tensor
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.core.indices import split_evenly
from weft.hooks.wrap import Forward
from weft.plan.stage_layouts import WHOLE, AxisMove, State
from weft.run.switch import gather, split, switch
from weft.run.world import World
from weft.switching.declare import StageCall, StageModule


class ShardedActivation:
    """Dims in order, one world for each axis that shards one of them, and the sizes of the whole."""

    def __init__(self, dims: list[str], worlds: tuple[World, ...]) -> None:
        self.dims, self.worlds = dims, worlds
        self.replicated: State = (WHOLE,) * len(worlds)
        self.placement = self.replicated
        self.sizes: dict[str, int] = {}

    def measure(self, stage: StageModule, x: Tensor, known: dict[str, int]) -> None:
        """Read the sizes off a whole tensor; of dims that are folded into one, all but one must be known."""
        if x.dim() != len(stage.groups):
            raise InputError(
                f"Stage {stage.name} got a tensor of shape {list(x.shape)}.",
                hint=f"Its dims were declared to be {stage}.",
            )
        sizes = dict(known)
        for group, size in sorted(zip(stage.groups, x.shape, strict=True), key=lambda item: len(item[0])):
            unknown = [dim for dim in group if dim not in sizes]
            if len(unknown) > 1:
                raise InputError(
                    f"Stage {stage.name} has {', '.join(unknown)} in one dim, so their sizes are not known.",
                    hint=f"Set one of them: weft.stages(…).sizes[{unknown[0]!r}] = …",
                )
            rest = max(1, prod(sizes[dim] for dim in group if dim in sizes))
            sizes |= {dim: size // rest for dim in unknown}
        self.sizes = {dim: sizes[dim] for dim in self.dims}

    def spans(self) -> dict[str, tuple[int, int]]:
        """Return this rank's (first, end) of each dim that is sharded now."""
        placed = zip(self.placement, self.worlds, strict=True)
        return {dim: self.span(dim, world) for dim, world in placed if dim != WHOLE}

    def span(self, dim: str, world: World) -> tuple[int, int]:
        """Return this rank's (first, end) of a dim that is sharded over a world."""
        return split_evenly(self.sizes[dim], world.comm.size)[world.comm.rank]

    def local_sizes(self) -> dict[str, int]:
        """Return the sizes of this rank's shard."""
        return self.sizes | {dim: end - first for dim, (first, end) in self.spans().items()}

    def unfold(self, stage: StageModule, x: Tensor) -> Tensor:
        """Return a stage's tensor with each dim by itself; its shape must agree with the placement."""
        sizes = self.local_sizes()
        expected = [prod(sizes[dim] for dim in group) for group in stage.groups]
        if list(x.shape) != expected:
            raise InputError(
                f"Stage {stage.name} has a tensor of shape {list(x.shape)}; sharded by "
                f"{' × '.join(self.placement)}, this rank's part of {stage} is {expected}.",
                hint="Between stages nothing may change the shape, or need the whole tensor.",
            )
        order = stage.order
        return x.reshape([sizes[dim] for dim in order]).permute([order.index(dim) for dim in self.dims])

    def fold(self, stage: StageModule, x: Tensor) -> Tensor:
        """Return the tensor with the dims of a stage."""
        sizes = dict(zip(self.dims, x.shape, strict=True))
        x = x.permute([self.dims.index(dim) for dim in stage.order])
        return x.reshape([prod(sizes[dim] for dim in group) for group in stage.groups])

    def run(self, stage: StageModule, forward: Forward, call: StageCall) -> PyTree:  # noqa: ARG002
        """Run a stage on its shard."""
        return forward(*call.args, **call.kwargs)

    def redistribute(self, x: Tensor, moves: tuple[AxisMove, ...], stage: str) -> Tensor:
        for move in moves:
            others = {dim for axis, dim in enumerate(self.placement) if axis != move.axis}
            dims = {dim: None if dim in others else size for dim, size in self.sizes.items()}
            mesh = self.worlds[move.axis]
            if move.verb == "split":
                x = split(x, move.target, dims=dims, mesh=mesh, stage=stage)
            elif move.verb == "gather":
                x = gather(x, move.source, dims=dims, mesh=mesh, stage=stage)
            else:
                x = switch(x, move.source, move.target, dims=dims, mesh=mesh, stage=stage)
            self.placement = (*self.placement[: move.axis], move.target, *self.placement[move.axis + 1 :])
        return x
