"""Find out whether stages, and the code between them, compute the rows of a sharded dim one by one.

The model runs without its other ranks. Each stage gets a few rows of the model's first tensor instead of its
input, of the dim that is sharded while it runs; what it and the code behind it compute of them, up to the
next stage, must be the same with rows of noise around them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.hooks.module_tree import modules
from weft.hooks.probe import NONE, MixedRows, ProbeRows, RowSpans, Trace, cannot_compare, find_mixing
from weft.hooks.wrap import Args, Forward, Kwargs
from weft.plan.stage_layouts import WHOLE, State
from weft.switching.declare import StageCall

if TYPE_CHECKING:
    from weft.switching.stages import Stages

ONE_ROW = 1, 1, 2
"""One row, one row of noise before it and two behind."""


class StageProbe:
    """One run. Of the dims that are sharded, that of one axis has noise; of the others there are two rows."""

    def __init__(self, stages: Stages, trace: Trace, axis: int, noise: int, *, own: bool) -> None:
        self.stages, self.trace, self.axis, self.noise, self.own = stages, trace, axis, noise, own
        self.seed = 0
        self.whole = torch.empty(0)

    def run(self, forward: Callable[[], PyTree], rows: list[RowSpans]) -> None:
        self.seed, self.stages.probe = len(rows), self
        self.trace.run(forward, rows)

    def run_stage(self, at: int, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        stages, stage = self.stages, self.stages.modules[at]
        activation = stages.activation
        call = StageCall.of(stage.name, args, kwargs)
        stages.check_order(at)
        if at == 0:
            activation.placement = activation.replicated
            stages.route = stages.measured(stage, call.x)
            self.whole = activation.unfold(stage, call.x.detach())
        else:
            self.trace.record("", f"the input of {stage.name}", call.x)
        assert stages.route is not None
        stages.check_samples(at, call)
        placement = stages.route.layouts[at]
        x = self._rows(placement)
        self.trace.dim = placement[self.axis]
        # What runs on the whole, or attends over ranks by itself, cannot mix.
        idle = placement[self.axis] == WHOLE or (stage.stage.inside and {*placement} & {*stage.stage.mixes})
        if idle:
            out = activation.fold(stage, x)
        else:
            call = call.with_tensor(activation.fold(stage, x))
            out = forward(*call.args, **call.kwargs)
        self.trace.record(stage.name, "output", out)
        if at < len(stages.modules) - 1:
            return out
        end = list(placement)
        for move in stages.route.moves[-1]:
            end[move.axis] = move.target
        self.trace.dim = end[self.axis]
        y = activation.fold(stage, self._rows(tuple(end)))
        return (y, *out[1:]) if isinstance(out, tuple) else y

    def _rows(self, placement: State) -> Tensor:
        """Return the first tensor of the model, with few rows of what is sharded."""
        activation, x = self.stages.activation, self.whole
        for axis, dim in enumerate(placement):
            if dim == WHOLE:
                continue
            at, rows = activation.dims.index(dim), self.picked(dim, axis)
            if self.own:
                self.trace.complete_sizes |= {len(rows.indices)} - {0, 1}
            elif axis != self.axis:
                rows = ProbeRows([0, activation.sizes[dim] - 1])
            x = x.index_select(at, torch.tensor([*rows.indices], device=x.device))
            if axis == self.axis and self.noise != NONE:
                rows.add_noise(x, at, self.seed)
        return x

    def picked(self, dim: str, axis: int | None = None) -> ProbeRows:
        """Return the rows of a dim, by default on the axis that has noise."""
        activation, axis = self.stages.activation, self.axis if axis is None else axis
        span = activation.span(dim, activation.worlds[axis])
        return ProbeRows.of(activation.sizes[dim], span, self.noise, ONE_ROW, own=self.own)


def check_mixing(stages: Stages, forward: Forward, args: Args, kwargs: Kwargs) -> None:
    """Raise on all ranks if rows of a sharded dim depend on others where no stage is declared to mix them."""
    worlds = stages.activation.worlds
    if cannot_compare((args, kwargs)):
        return
    for axis in (axis for axis, world in enumerate(worlds) if world.comm.size > 1):
        runs = partial(_compare_runs, stages, axis, partial(forward, *args, **kwargs))
        mixing = find_mixing(stages.model, [world.comm for world in worlds], runs)
        if mixing is not None:
            raise _error(stages, *mixing)


def _compare_runs(  # noqa: PLR0913
    stages: Stages,
    axis: int,
    forward: Callable[[], PyTree],
    trace: Trace,
    first_noise: int,
    second_noise: int,
    own: bool,  # noqa: FBT001
) -> MixedRows | None:
    first = StageProbe(stages, trace, axis, first_noise, own=own)
    first.run(forward, [])
    second = StageProbe(stages, trace, axis, second_noise, own=own)
    rows: dict[RowSpans, None] = {}
    assert stages.route is not None
    for dim in {placement[axis] for placement in stages.route.layouts} - {WHOLE}:
        a, b = first.picked(dim), second.picked(dim)
        if a.same:
            rows[RowSpans(len(a.indices), len(b.indices), ((a.front, b.front, a.same),))] = None
    if not rows:
        return None
    second.run(forward, list(rows))
    return trace.first_mixed()


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
    rows = f"rows of {dim or 'what is sharded'}"
    does = f"mixes {dim}" if mixes and dim else f"computes a row from {cause.format(rows)}"
    return InputError(
        f"{kind} {does}, which is sharded while it runs.",
        hint="Make it a stage, and declare what it mixes."
        if mixes
        else "Take positions and sizes from the whole, before the first stage, or in a stage that mixes it.",
    )
