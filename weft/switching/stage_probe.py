"""Check that stages, and the code between them, compute each row of a sharded dim independently of others.

Each rank runs the model by itself, twice. Instead of its input, each stage gets a few rows of the tensor that
the first stage got, along the dim that is sharded while the stage runs. The second run has rows of noise
around them. Up to the input of the next stage, all outputs for the rows of both runs must be the same.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.hooks.module_tree import modules
from weft.hooks.probe import NONE, MixedRows, ProbeRows, RowSpans, Trace, cannot_compare, find_mixing
from weft.hooks.wrap import Args, Forward, Kwargs
from weft.plan.stage_layouts import WHOLE, AxisMove
from weft.switching.activation import ShardedActivation
from weft.switching.declare import StageCall, StageModule

if TYPE_CHECKING:
    from weft.switching.stages import Stages

ONE_ROW = 1, 1, 2
"""One row, one row of noise before it and two behind."""


class ProbeActivation(ShardedActivation):
    """A `ShardedActivation` that gives each stage a few rows of the first stage's input, and sends nothing.

    trace   records or compares inputs and outputs of stages.
    axis    of the mesh: noise is added to the dim that is sharded over it. Of dims sharded over other axes
            there are two rows.
    noise   where it is added, as in `weft.hooks.probe`.
    own     use all rows of this rank's shard, for models that cannot run on few.
    """

    def __init__(self, real: ShardedActivation, trace: Trace, axis: int, noise: int, *, own: bool) -> None:
        super().__init__(real.dims, real.worlds)
        self.trace, self.axis, self.noise, self.own = trace, axis, noise, own
        self.whole = torch.empty(0)

    def measure(self, stage: StageModule, x: Tensor, known: dict[str, int]) -> None:
        super().measure(stage, x, known)
        self.placement = self.replicated
        self.whole = super().unfold(stage, x)

    def unfold(self, stage: StageModule, x: Tensor) -> Tensor:
        self.trace.record("", f"the input of {stage.name}", x)
        return self.whole

    def redistribute(self, x: Tensor, moves: tuple[AxisMove, ...], stage: str) -> Tensor:  # noqa: ARG002
        for move in moves:
            self.placement = (*self.placement[: move.axis], move.target, *self.placement[move.axis + 1 :])
        self.trace.dim = self.placement[self.axis]
        for axis, dim in enumerate(self.placement):
            if dim == WHOLE:
                continue
            rows = self.picked(dim, axis)
            if self.own:
                self.trace.complete_sizes |= {len(rows.indices)} - {0, 1}
            elif axis != self.axis:
                rows = ProbeRows([0, self.sizes[dim] - 1])
            is_noisy = axis == self.axis and self.noise != NONE
            x = rows.pick(x, self.dims.index(dim), seed=int(bool(self.trace.rows)) if is_noisy else None)
        return x

    def run(self, stage: StageModule, forward: Forward, call: StageCall) -> PyTree:
        # A stage that runs on the whole tensor, or attends over ranks by itself (`inside`), may mix: skip it.
        attends = stage.stage.inside and {*self.placement} & {*stage.stage.mixes}
        is_idle = self.placement[self.axis] == WHOLE or attends
        out = call.x if is_idle else super().run(stage, forward, call)
        self.trace.record(stage.name, "output", out)
        return out

    def picked(self, dim: str, axis: int) -> ProbeRows:
        """Return the rows of a dim that is sharded over an axis."""
        span = self.span(dim, self.worlds[axis])
        return ProbeRows.of(self.sizes[dim], span, self.noise, ONE_ROW, own=self.own)

    def compared(self, first: ProbeActivation, dims: set[str]) -> list[RowSpans]:
        """Return the rows to compare with the first run: those that both have, if any, of each of `dims`."""
        self.sizes = first.sizes
        pairs = [(first.picked(dim, self.axis), self.picked(dim, self.axis)) for dim in dims]
        spans = (RowSpans(len(a.indices), len(b.indices), ((a.front, b.front, a.same),)) for a, b in pairs)
        return list(dict.fromkeys(each for each in spans if each.same[0][2]))


def check_mixing(stages: Stages, forward: Forward, args: Args, kwargs: Kwargs) -> InputError | None:
    """Raise on all ranks if rows of a sharded dim depend on others where no stage is declared to mix them.

    If the probe itself failed, return its error, to be raised after the model's forward if that succeeds.
    """
    real = stages.activation
    if cannot_compare((args, kwargs)):
        return None

    def run(
        axis: int,
        trace: Trace,
        noise: int,
        own: bool,  # noqa: FBT001
        first: ProbeActivation | None,
    ) -> ProbeActivation:
        activation = ProbeActivation(real, trace, axis, noise, own=own)
        rows = None
        if first is not None and stages.route is not None:
            dims = {placement[axis] for placement in stages.route.layouts} - {WHOLE}
            rows = activation.compared(first, dims)
        stages.activation = activation
        try:
            trace.run(partial(forward, *args, **kwargs), rows)
        finally:
            stages.activation = real
        return activation

    for axis in (axis for axis, world in enumerate(real.worlds) if world.comm.size > 1):
        mixing = find_mixing(stages.model, [world.comm for world in real.worlds], partial(run, axis))
        if isinstance(mixing, InputError):
            return mixing
        if mixing is not None:
            raise _error(stages, *mixing)
    return None


def _error(stages: Stages, mixed: MixedRows, cause: str) -> InputError:
    name, dim = mixed
    stage = next((each for each in stages.modules if f"{name}.".startswith(f"{each.name}.")), None)
    mixes = cause.startswith("other")
    if stage is not None and mixes:
        declared = " ".join((*stage.stage.mixes, dim))
        return InputError(
            f"Stage {stage.name} mixes {dim}, which is sharded while it runs"
            f"{'' if stage.name == name else f', in {name}'}.",
            hint=f'Declare that it does: {{"{stage.name}": "{declared}"}}.',
        )
    kind = f"{name} ({type(modules(stages.model)[name]).__name__})" if name else type(stages.model).__name__
    rows = f"rows of {dim or 'a sharded dim'}"
    does = f"mixes {dim}" if mixes and dim else f"computes a row from {cause.format(rows)}"
    return InputError(
        f"{kind} {does}, which is sharded while it runs.",
        hint="Declare it as a stage, with the dims that it mixes."
        if mixes
        else "Take positions and sizes from the whole tensor: before all stages, or in one that mixes it.",
    )
