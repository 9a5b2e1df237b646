"""ParallelHandle: what `parallelize` has put on a pipeline or a model, and puts on their copies."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, wraps
from importlib import import_module
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakSet

from torch import nn

from weft.core.errors import InputError
from weft.models.adapter import Adapter, parameters, unwrapped
from weft.models.adapters import adapter_of
from weft.models.clock import Clock
from weft.models.decode import Spread, spread
from weft.models.explain import explained
from weft.models.guidance import Guidance
from weft.models.latte import Switching
from weft.models.randomness import share_numbers
from weft.models.region import Region
from weft.models.same import Comparison
from weft.models.sparsity import Sparsity, sparse_attention
from weft.models.unsupported import check_plan
from weft.models.wrap import Around, Method, derived, unwrap_module, wrap_module
from weft.run import trace
from weft.run.transforms import check_call
from weft.run.world import World, axes_of, world_of

HANDLE = "_weft"


class Options(NamedTuple):
    """What `parallelize` was given."""

    plan: Any = "auto"
    sparse: Any = None
    cfg: str = "auto"
    mesh: Any = None
    check: str = "none"
    backend: str = "auto"
    adapter: Adapter | None = None


class ParallelHandle:
    """What was put on a pipeline or a model. Its copies have their own, with the same options and ranks."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.regions: dict[str, Region | Switching] = {}
        self.clock = Clock()
        self._guidance: list[Guidance] = []
        self._marked: list[Any] = []
        self._pipes: WeakSet[Any] = WeakSet()
        self._spreads: list[Spread] = []

    @cached_property
    def world(self) -> World:
        return world_of(self.options.mesh, 60.0)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParallelHandle:
        new = memo[id(self)] = ParallelHandle(self.options)
        return new

    def __reduce__(self) -> Any:
        return type(None), ()  # of a model on one rank, which nothing was put on

    def apply(self, name: str, model: nn.Module) -> None:
        """Let a model's forward be that of its region, under guidance."""
        given, comm = self.options, self.world.comm
        adapter, guidance = given.adapter or adapter_of(model), Guidance.of(model, given.mesh, given.cfg)
        if comm.size == 1 and given.sparse is None:  # there is nothing to do
            return
        sparsity = None if given.sparse is None else sparse_attention(given.sparse)
        guidance.batched = not getattr(sparsity, "changes", False)
        plan = given.plan
        if sparsity is not None and plan == "auto":
            plan = axes_of(given.mesh) or plan  # the axes of a mesh may name a plan
        if adapter.attention:
            check_plan(plan, comm.size, guidance, asked=given.cfg)
        how: dict[str, Any] = {
            "name": name,
            "plan": plan,
            "sparsity": sparsity,
            "backend": given.backend,
            "clock": self.clock,
            "tells": comm.rank == 0,
        }
        self.regions[name] = region = _region(model, adapter, check=given.check, **how)
        self._guidance.append(guidance)
        inputs = Comparison(type(model).__name__, parameters(model), always=given.check == "always")
        wrap_module(model, ModelHook(self, name, region, guidance, inputs))
        self.mark(model)
        if "diffusers" in sys.modules:
            _follow_pipelines()

    def mark(self, target: Any) -> None:
        """Nobody else may split it."""
        vars(target)[HANDLE] = self
        self._marked.append(target)

    def share(self, pipe: Any, *, decodes: bool = False) -> None:
        """Let a pipeline with a parallelized part draw rank 0's random numbers, and decode on all ranks."""
        if HANDLE not in vars(pipe):
            wrap_module(pipe, PipelineHook())
            vars(pipe)[HANDLE] = self
            self._pipes.add(pipe)
        if decodes and isinstance(vae := getattr(pipe, "vae", None), nn.Module):
            self._spreads.append(spread(vae, self.world))

    def worlds(self) -> Iterator[tuple[World, str]]:
        """Every world that a model has run on, and the name that planners know the model by."""
        for region in self.regions.values():
            if isinstance(region, Region):
                yield from ((world, region.name) for world in region.worlds)

    @property
    def sparsities(self) -> list[Sparsity]:
        found = (getattr(region, "sparsity", None) for region in self.regions.values())
        return [each for each in found if isinstance(each, Sparsity)]

    def begin(self, steps: int | None, scheduler: Any = None) -> None:
        """A run of so many steps, if that is known."""
        self.clock.reset(steps, told=True)
        self.clock.follow(scheduler)
        for sparsity in self.sparsities:
            sparsity.reset()

    def end(self) -> None:
        """A run is over: its plans are saved, its calls forgotten, what its masks left out is told."""
        self.clock.reset()
        for world, _ in self.worlds():
            world.planner.save()
        for guidance in self._guidance:
            guidance.forget()
        if self.world.comm.rank:
            return
        for sparsity in self.sparsities:
            sys.stderr.write(f"weft: {sparsity.summary()}\n")
        if self.sparsities and hasattr(trace.active, "keep_plans"):
            trace.active.keep_plans(explained(self))  # type: ignore[union-attr]

    def undo(self) -> None:
        """Take it off what it is on now; what others have put on since stays."""
        for region in self.regions.values():
            region.remove()
            unwrap_module(region.model)
        for each in self._spreads:
            each.remove()
        for pipe in list(self._pipes):
            unwrap_module(pipe)
        for each in (*self._marked, *self._pipes):
            vars(each).pop(HANDLE, None)
        self.__init__(self.options)


@dataclass(eq=False)
class ModelHook(Around):
    """The forward of a parallelized model; of one that is plain, if it has no region."""

    handle: ParallelHandle
    name: str
    region: Any = None
    guidance: Any = None
    inputs: Any = None
    opaque = True  # blocks are compiled; what goes on around them is not

    def around(self, forward: Method, args: Any, kwargs: Any) -> Any:
        if self.region is None:
            return forward(*args, **kwargs)
        handle, region = self.handle, self.region
        check_call(f"A parallelized {type(region.model).__name__}")
        region.forward = forward
        # A pipeline that is called has compared its arguments, and its ranks draw the same numbers.
        with self.inputs(handle.world, region.model, args, kwargs, values=not handle.clock.is_told):
            return self.guidance(region.run, args, kwargs)

    def before_copy(self) -> None:
        if isinstance(self.region, Switching):
            self.region.remove()  # until the next forward

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelHook:
        return ModelHook(deepcopy(self.handle, memo), self.name)

    def after_copy(self, new: Any) -> None:
        self.handle.apply(self.name, new)


class PipelineHook(Around):
    """The call of a pipeline with parallelized parts: rank 0's random numbers, and steps that are counted."""

    method = "__call__"

    def around(self, forward: Method, args: Any, kwargs: Any) -> Any:
        pipe, call = forward.args[0], forward.func  # type: ignore[attr-defined]
        parts = [unwrapped(part) for part in pipe.components.values() if isinstance(part, nn.Module)]
        found = [vars(part).get(HANDLE) for part in (pipe, *parts)]
        handles: list[ParallelHandle] = list({id(handle): handle for handle in found if handle}.values())
        if not handles:  # its parts were restored
            return forward(*args, **kwargs)
        share_numbers(handles[0].world, (args, kwargs))
        for handle in handles:
            handle.begin(_steps(call, pipe, args, kwargs), getattr(pipe, "scheduler", None))
        try:
            return forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle.end()

    def __deepcopy__(self, memo: dict[int, Any]) -> PipelineHook:
        return PipelineHook()

    def after_copy(self, new: Any) -> None:
        vars(new).pop(HANDLE).share(new, decodes=True)


def handle_of(target: Any) -> ParallelHandle | None:
    return getattr(target, HANDLE, None)


def _region(model: nn.Module, adapter: Adapter, *, check: str, **how: Any) -> Region | Switching:
    if adapter.attention:
        return Region(model, adapter, check=check != "none", **how)
    if how["sparsity"] is not None:
        raise InputError(f"A {type(model).__name__} is split by switching dims, without masks.")
    return Switching(model)


def _steps(call: Callable[..., Any], *given: Any) -> int | None:
    """How many steps a pipeline is asked for."""
    pipe, args, kwargs = given
    bound = signature(call).bind(pipe, *args, **kwargs)
    bound.apply_defaults()
    told = bound.arguments
    listed = next((told[name] for name in ("timesteps", "sigmas") if told.get(name) is not None), None)
    return told.get("num_inference_steps") if listed is None else len(listed)


def _follow_pipelines() -> None:
    """From now on, a pipeline of Diffusers' that gets a parallelized part shares random numbers.

    As `from_pipe` makes them; nothing but this can tell: they draw before they call the part.
    """
    pipelines: Any = import_module("diffusers.pipelines.pipeline_utils").DiffusionPipeline
    plain = pipelines.__setattr__
    if hasattr(plain, "_weft"):
        return

    @wraps(plain)
    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807 - it becomes one
        plain(self, name, value)
        handle = vars(unwrapped(value)).get(HANDLE) if isinstance(value, nn.Module) else None
        if handle is not None:
            handle.share(self)

    __setattr__._weft = True  # type: ignore[attr-defined]
    pipelines.__setattr__ = __setattr__
    types: Any = pipelines._get_signature_types.__func__

    def _get_signature_types(cls: type) -> dict[str, tuple[type, ...]]:
        """With the classes that parallelized parts have: from_pipe wants exactly these."""
        return {name: (*kinds, *chain(*map(derived, kinds))) for name, kinds in types(cls).items()}

    pipelines._get_signature_types = classmethod(_get_signature_types)
