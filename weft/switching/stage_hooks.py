"""StageHook: run a module of a model with stages, a stage or what lies between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import nn
from torch.utils._pytree import PyTree

from weft.hooks.input_check import is_recomputing
from weft.hooks.wrap import Args, Forward, ForwardWrapper, Kwargs
from weft.switching.declare import StageCall

if TYPE_CHECKING:
    from weft.switching.stages import Stages


class StageHook(ForwardWrapper):
    """Runs a stage, or a module between stages.

    When it is recomputed, outside of the model's forward, it has the placement and the dropout that it had.

    at      the number of the stage; None: between stages.
    inner   runs the module on this rank's shard, if not its forward alone.
    """

    def __init__(self, stages: Stages, module: nn.Module, at: int | None = None) -> None:
        self.stages, self.module, self.at = stages, module, at
        self.inner: Callable[..., PyTree] | None = None

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        stages = self.stages
        if not is_recomputing():
            stages.placements[self] = stages.activation.placement
        elif not stages.is_running and any(module.training for module in self.module.modules()):
            stages.activation.placement = stages.placements[self]
            with stages.dropout:
                return self._run(forward, args, kwargs)
        return self._run(forward, args, kwargs)

    def _run(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        stages, at = self.stages, self.at
        if at is None:
            return forward(*args, **kwargs)
        if self.inner is not None:
            forward = partial(self.inner, forward)
        stage = stages.modules[at]
        call = stages.enter(at, StageCall.of(stage.name, args, kwargs))
        return stages.leave(at, call, stages.activation.run(stage, forward, call))
