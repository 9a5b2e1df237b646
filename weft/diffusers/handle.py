"""ParallelHandle: apply `parallelize` to the models of a pipeline and to their copies, and undo it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property, partial, wraps
from importlib import import_module
from inspect import signature
from itertools import chain
from typing import NamedTuple, Protocol
from weakref import WeakSet

from torch import nn
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.diffusers.adapter import Adapter
from weft.diffusers.adapters import adapter_of
from weft.diffusers.checks import PlanSpec, check_plan
from weft.diffusers.explain import explained
from weft.diffusers.guidance import Guidance
from weft.diffusers.latte import ShardedLatte
from weft.diffusers.region import ShardedRegion
from weft.diffusers.sampled_check import SampledCheck
from weft.diffusers.step_caches import StepCaches
from weft.diffusers.step_counter import StepCounter
from weft.diffusers.vae import DecodeHook, parallelize_vae
from weft.hooks.input_check import Comparison
from weft.hooks.module_tree import forward_parameters, unwrapped
from weft.hooks.rng import broadcast_rng
from weft.hooks.step_cache import register_derived_blocks
from weft.hooks.wrap import (
    Args,
    Forward,
    ForwardWrapper,
    Kwargs,
    Target,
    derived_classes,
    unwrap_module,
    wrap_module,
)
from weft.run.measure import trace
from weft.run.transforms import check_call
from weft.run.world import MeshLike, World, axes_of, world_of
from weft.sparse.context import SparseAttention
from weft.sparse.mask_cache import MaskCache, sparse_attention

HANDLE = "_weft"


class Pipeline(Protocol):
    """A pipeline of Diffusers, or one like it."""

    @property
    def components(self) -> Mapping[str, PyTree]: ...


class ParallelOptions(NamedTuple):
    """The arguments of `parallelize`."""

    plan: PlanSpec = "auto"
    sparse: str | BlockMask | SparseAttention | None = None
    cfg: str = "auto"
    mesh: MeshLike = None
    check: str = "none"
    backend: str = "auto"
    adapter: Adapter | None = None


class ParallelHandle:
    """The state of a parallelized pipeline or model. Copies have their own, with equal options and ranks."""

    def __init__(self, options: ParallelOptions) -> None:
        self.options = options
        self.regions: dict[str, ShardedRegion | ShardedLatte] = {}
        self.step_counter = StepCounter()
        self._guidance: list[Guidance] = []
        self._marked: list[Target] = []
        self._pipes: WeakSet[Pipeline] = WeakSet()
        self._vaes: list[DecodeHook] = []

    @cached_property
    def world(self) -> World:
        return world_of(self.options.mesh, 60.0)

    def __deepcopy__(self, memo: dict[int, PyTree]) -> ParallelHandle:
        new = memo[id(self)] = ParallelHandle(self.options)
        return new

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()  # of a model on one rank, to which nothing was applied

    def apply(self, name: str, model: nn.Module) -> None:
        """Replace a model's forward by that of its region, under guidance."""
        options, comm = self.options, self.world.comm
        adapter = options.adapter or adapter_of(model)
        guidance = Guidance.of(model, options.mesh, options.cfg)
        sparsity = None if options.sparse is None else sparse_attention(options.sparse)
        guidance.batched = not getattr(sparsity, "changes", False)
        plan = options.plan
        if sparsity is not None and plan == "auto":
            plan = axes_of(options.mesh) or plan  # the axes of a mesh may name a plan
        if adapter.attention:
            check_plan(plan, comm.size, guidance, cfg=options.cfg)
        if comm.size == 1 and sparsity is None:  # there is nothing to do
            return
        if adapter.attention:
            kind = type(model).__name__
            region = ShardedRegion(
                model,
                adapter,
                kind if name == kind else f"{kind} {name}",
                plan,
                sparsity,
                self.step_counter,
                options.backend,
                None if options.check == "none" else SampledCheck(),
                verbose=comm.rank == 0,
            )
        elif sparsity is not None:
            raise InputError(
                f"A {type(model).__name__} is split by switching dims, which does not support sparse=."
            )
        else:
            region = ShardedLatte(model)
        self.regions[name] = region
        self._guidance.append(guidance)
        inputs = Comparison(type(model).__name__, forward_parameters(model), always=options.check == "always")
        wrap_module(model, ModelHook(self, name, region, guidance, inputs))
        self.mark(model)
        if "diffusers" in sys.modules:
            _follow_pipelines()
            register_derived_blocks()

    def mark(self, target: Target) -> None:
        """Mark the target as parallelized, so that a second `parallelize` call fails."""
        vars(target)[HANDLE] = self
        self._marked.append(target)

    def share(self, pipe: Pipeline, *, decodes: bool = False) -> None:
        """Wrap a pipeline with a parallelized part: rank 0's random numbers, and decoding on all ranks."""
        if HANDLE not in vars(pipe):
            wrap_module(pipe, PipelineHook())
            vars(pipe)[HANDLE] = self
            self._pipes.add(pipe)
        if decodes and isinstance(vae := getattr(pipe, "vae", None), nn.Module):
            self._vaes.append(parallelize_vae(vae, self.world))

    def worlds(self) -> Iterator[tuple[World, str]]:
        """Yield every world that a model has run on, and the model's name in plans."""
        for region in self.regions.values():
            if isinstance(region, ShardedRegion):
                yield from ((world, region.name) for world in region.worlds)

    @property
    def mask_caches(self) -> list[MaskCache]:
        mask_caches = (getattr(region, "sparsity", None) for region in self.regions.values())
        return [each for each in mask_caches if isinstance(each, MaskCache)]

    @property
    def step_caches(self) -> list[StepCaches]:
        return [region.caches for region in self.regions.values() if isinstance(region, ShardedRegion)]

    def begin(self, steps: int | None, scheduler: Target = None) -> None:
        """Begin a run of so many steps, if that is known."""
        self.step_counter.reset(steps, announced=True)
        self.step_counter.follow(scheduler)
        for cache in (*self.mask_caches, *self.step_caches):
            cache.reset()

    def end(self) -> None:
        """End a run: save its plans, drop its calls, print the statistics of its masks."""
        self.step_counter.reset()
        for world, _ in self.worlds():
            world.planner.save()
        for guidance in self._guidance:
            guidance.forget()
        if self.world.comm.rank:
            return
        for cache in (*self.mask_caches, *(each for each in self.step_caches if each.is_used)):
            sys.stderr.write(f"weft: {cache.summary()}\n")
        if self.mask_caches and (save_plans := getattr(trace.active, "keep_plans", None)) is not None:
            save_plans(explained(self))

    def undo(self) -> None:
        """Undo `apply`, `mark` and `share`; keep wrappers that other libraries added since."""
        for cache in self.step_caches:
            cache.reset()
        for region in self.regions.values():
            region.remove()
            unwrap_module(region.model)
        for vae in self._vaes:
            vae.remove()
        for pipe in list(self._pipes):
            unwrap_module(pipe)
        for each in (*self._marked, *self._pipes):
            vars(each).pop(HANDLE, None)
        self.__init__(self.options)


@dataclass(eq=False)
class ModelHook(ForwardWrapper):
    """Runs the forward of a parallelized model."""

    handle: ParallelHandle
    name: str
    region: ShardedRegion | ShardedLatte
    guidance: Guidance
    inputs: Comparison
    opaque = True  # blocks are compiled; the code around them is not

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        check_call(f"A parallelized {type(self.region.model).__name__}")
        self.region.forward = forward
        # A pipeline has already compared its arguments, and its ranks draw the same random numbers.
        values = not self.handle.step_counter.is_announced
        with self.inputs(self.handle.world, self.region.model, args, kwargs, values=values):
            return self.guidance(self.region.run, args, kwargs)

    def __deepcopy__(self, memo: dict[int, PyTree]) -> ModelHook:
        return replace(self, handle=deepcopy(self.handle, memo))

    def after_copy(self, new: nn.Module) -> None:
        self.handle.apply(self.name, new)


class PipelineHook(ForwardWrapper):
    """Runs a pipeline with parallelized parts: with rank 0's random numbers, and counted steps."""

    method = "__call__"

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        assert isinstance(forward, partial)
        pipe, call = forward.args[0], forward.func
        models = [unwrapped(each) for each in pipe.components.values() if isinstance(each, nn.Module)]
        marks = [vars(each).get(HANDLE) for each in (pipe, *models)]
        handles = list(dict.fromkeys(handle for handle in marks if handle is not None))
        if not handles:  # its parts were restored
            return forward(*args, **kwargs)
        broadcast_rng(handles[0].world, args, kwargs)
        for handle in handles:
            handle.begin(_steps(call, pipe, args, kwargs), getattr(pipe, "scheduler", None))
        try:
            return forward(*args, **kwargs)
        finally:
            for handle in handles:
                handle.end()

    def __deepcopy__(self, memo: dict[int, PyTree]) -> PipelineHook:
        return PipelineHook()

    def after_copy(self, new: Pipeline) -> None:
        vars(new).pop(HANDLE).share(new, decodes=True)


def handle_of(target: Target) -> ParallelHandle | None:
    return getattr(target, HANDLE, None)


def _steps(call: Forward, pipe: Pipeline, args: Args, kwargs: Kwargs) -> int | None:
    """Return the number of steps of a pipeline's call."""
    bound = signature(call).bind(pipe, *args, **kwargs)
    bound.apply_defaults()
    arguments = bound.arguments
    lists = (arguments.get(name) for name in ("timesteps", "sigmas"))
    listed = next((each for each in lists if each is not None), None)
    return arguments.get("num_inference_steps") if listed is None else len(listed)


def _follow_pipelines() -> None:
    """From now on, a Diffusers pipeline that gets a parallelized part shares random numbers.

    Pipelines that `from_pipe` makes draw numbers before they call the part, so the part cannot do it.
    """
    pipelines: Target = import_module("diffusers.pipelines.pipeline_utils").DiffusionPipeline
    plain = pipelines.__setattr__
    if hasattr(plain, "_weft"):
        return

    @wraps(plain)
    def __setattr__(self: Pipeline, name: str, value: PyTree) -> None:  # noqa: N807 - it becomes one
        plain(self, name, value)
        handle = vars(unwrapped(value)).get(HANDLE) if isinstance(value, nn.Module) else None
        if handle is not None:
            handle.share(self)

    vars(__setattr__)["_weft"] = True
    pipelines.__setattr__ = __setattr__
    types: Forward = pipelines._get_signature_types.__func__

    def _get_signature_types(cls: type) -> dict[str, tuple[type, ...]]:
        """Add the classes that parallelized parts have: from_pipe requires exact ones."""
        return {name: (*kinds, *chain(*map(derived_classes, kinds))) for name, kinds in types(cls).items()}

    pipelines._get_signature_types = classmethod(_get_signature_types)
