"""Rehearsal: find out whether stages, and what is between them, compute the rows of a sharded dim one by one.

The model runs without its other ranks. Whatever arrives at a stage, the stage gets a few rows of the model's
first tensor in its place, of the dim that is sharded while it runs; what it and the code behind it make of
them, up to the next stage, must be the same with rows of noise around them.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.utils._pytree import tree_leaves

from weft.core.errors import InputError
from weft.core.indices import split_evenly
from weft.models.adapter import modules, put
from weft.models.probe import AROUND, NONE, Blamed, Rows, Trace, find_mixing, noise_like
from weft.models.sites import Call
from weft.plan.stages import WHOLE, State

if TYPE_CHECKING:
    from weft.models.stages import Stages

FRONT, BACK = 1, 2
"""Rows of noise around one row."""


class Rehearsal:
    """One run. Of the dims that are sharded, that of one axis has noise; of the others there are two rows."""

    def __init__(self, stages: Stages, trace: Trace, axis: int, noise: int, *, own: bool) -> None:
        self.stages, self.trace, self.axis, self.noise, self.own = stages, trace, axis, noise, own
        self.seed = 0
        self.whole = torch.empty(0)

    def run(self, args: Any, kwargs: Any, rows: list[Rows]) -> None:
        self.seed = len(rows)
        with ExitStack() as stack:
            for at, site in enumerate(self.stages._sites):
                stack.callback(put(site.module, "forward", partial(self._run_stage, at, site.module.forward)))
            self.trace.run(partial(self.stages._model.forward, *args, **kwargs), rows)

    def _run_stage(self, at: int, forward: Any, *args: Any, **kwargs: Any) -> Any:
        stages, site = self.stages, self.stages._sites[at]
        call = Call.find(args, kwargs)
        if call is None:
            raise InputError(f"Stage {site.name} is given no tensor.")
        if at == 0:
            stages._stream.layout = stages._stream.whole
            stages.route = stages._measured(site, call.x)
            self.whole = stages._stream.apart(site, call.x.detach())
        else:
            self.trace.note("", f"what {site.name} is given", call.x)
        assert stages.route is not None
        stages.refuse_samples(at, call)
        layout = stages.route.layouts[at]
        x = self._rows(layout)
        self.trace.dim = layout[self.axis]
        given = call.given(stages._stream.together(site, x))
        # What runs on the whole, or attends over ranks by itself, has nothing to be found out.
        idle = layout[self.axis] == WHOLE or (site.stage.inside and {*layout} & {*site.stage.mixes})
        out = stages._stream.together(site, x) if idle else forward(*given[0], **given[1])
        self.trace.note(site.name, "output", out)
        if at < len(stages._sites) - 1:
            return out
        end = list(layout)
        for move in stages.route.moves[-1]:
            end[move.axis] = move.target
        self.trace.dim = end[self.axis]
        y = stages._stream.together(site, self._rows(tuple(end)))
        return (y, *out[1:]) if isinstance(out, tuple) else y

    def _rows(self, layout: State) -> Tensor:
        """The first tensor of the model, with few rows of what is sharded."""
        stream, x = self.stages._stream, self.whole
        for axis, (dim, world) in enumerate(zip(layout, stream.worlds, strict=True)):
            if dim == WHOLE:
                continue
            at, size = stream.dims.index(dim), stream.sizes[dim]
            start, stop = split_evenly(size, world.comm.size)[world.comm.rank] if self.own else (0, size)
            front, back = self._noise(stop - start)
            if self.own:
                picked = list(range(start, stop))
                self.trace.whole |= {len(picked)} - {0, 1}
            elif axis == self.axis:
                picked = [size // 2] * (front + 1 + back)
            else:
                picked = [0, size - 1]
            x = x.index_select(at, torch.tensor(picked, device=x.device))
            if axis == self.axis and self.noise != NONE:
                for rows in x.narrow(at, 0, front), x.narrow(at, len(picked) - back, back):
                    rows.copy_(noise_like(rows, self.seed))
        return x

    def _noise(self, count: int) -> tuple[int, int]:
        """Rows before and behind the others."""
        if self.own:
            return (-(-count // 4), count // 3) if count > 1 else (0, 0)
        return {NONE: (0, 0), AROUND: (FRONT, BACK)}.get(self.noise, (BACK, FRONT))

    def same(self, dim: str) -> tuple[int, int, int]:
        """Rows of a dim, the first that is not noise, and how many are not."""
        size, world = self.stages._stream.sizes[dim], self.stages._stream.worlds[self.axis]
        start, stop = split_evenly(size, world.comm.size)[world.comm.rank]
        front, back = self._noise(stop - start)
        count = stop - start if self.own else front + 1 + back
        return count, front, count - front - back


def refuse_mixing(stages: Stages, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise on all ranks if rows of a sharded dim depend on others where no stage is declared to mix them."""
    worlds = stages._stream.worlds
    if detect_fake_mode(tree_leaves((args, kwargs))):
        return
    for axis in (axis for axis, world in enumerate(worlds) if world.comm.size > 1):

        def compared(trace: Trace, *noise: int, own: bool, axis: int = axis) -> Blamed | None:
            first = Rehearsal(stages, trace, axis, noise[0], own=own)
            first.run(args, kwargs, [])
            second = Rehearsal(stages, trace, axis, noise[1], own=own)
            rows: dict[Rows, None] = {}
            assert stages.route is not None
            for dim in {layout[axis] for layout in stages.route.layouts} - {WHOLE}:
                (a, x, length), (b, y, _) = first.same(dim), second.same(dim)
                rows |= {Rows(a, b, ((x, y, length),)): None} if length and a else {}
            if not rows:
                return None
            second.run(args, kwargs, list(rows))
            return trace.blamed()

        probes = [partial(compared, own=False), partial(compared, own=True)]
        found = find_mixing(stages._model, [world.comm for world in worlds], probes)
        if found is not None:
            raise _refusal(stages, *found)


def _refusal(stages: Stages, blamed: Blamed, cause: str) -> InputError:
    name, dim = blamed
    site = next((each for each in stages._sites if f"{name}.".startswith(f"{each.name}.")), None)
    mixes = cause.startswith("other")
    if site is not None and mixes:
        declared = " ".join((*site.stage.mixes, dim))
        return InputError(
            f"Stage {site.name} mixes {dim}, which is sharded while it runs"
            f"{'' if site.name == name else f', in {name}'}.",
            hint=f'Declare that it does: {{"{site.name}": "{declared}"}}.',
        )
    kind = f"{name} ({type(modules(stages._model)[name]).__name__})" if name else type(stages._model).__name__
    rows = f"rows of {dim or 'what is sharded'}"
    does = f"mixes {dim}" if mixes and dim else f"computes a row from {cause.format(rows)}"
    return InputError(
        f"{kind} {does}, which is sharded while it runs.",
        hint="Make it a stage, and declare what it mixes."
        if mixes
        else "Take positions and sizes from the whole, before the first stage, or in a stage that mixes it.",
    )
