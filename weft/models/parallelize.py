"""`weft.parallelize`: a Diffusers pipeline or transformer runs with its tokens split over the ranks.

    pipe = weft.parallelize(pipe.to(weft.device()))   # under torchrun, or: weft run script.py --ranks 4
    weft.restore(pipe)

The pipeline is called as before, with the same arguments on every rank, and returns the same on all.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial, wraps
from inspect import signature
from typing import Any

import torch
from torch import nn

from weft.core.backends import check_backend
from weft.core.errors import InputError
from weft.models.adapter import Adapter, parameters, put, unwrapped
from weft.models.adapters import adapter_of, knows
from weft.models.clock import Clock
from weft.models.decode import spread
from weft.models.explain import explained
from weft.models.guidance import Guidance
from weft.models.latte import Switching
from weft.models.randomness import share_numbers
from weft.models.region import Region
from weft.models.same import Comparison
from weft.models.sparsity import Sparsity, sparse_attention
from weft.run import trace
from weft.run.devices import check_devices
from weft.run.world import World, axes_of, is_launched, world_of

CHECKS = ("always", "first", "none")


def parallelize(  # noqa: PLR0913 - the one call users make; each option is a word of theirs
    target: Any,
    *,
    plan: Any = "auto",
    sparse: Any = None,
    cfg: str = "auto",
    mesh: Any = None,
    check: str = "none",
    backend: str = "auto",
    adapter: Adapter | None = None,
) -> Any:
    """Split the tokens of a pipeline's transformers, or of one transformer, over the ranks; return it.

    plan      how attention is split: see `weft.attention`.
    sparse    sparse attention: sta, svg, radial, topk:0.2, … or an object with mask(ctx, q, k)
              (`weft.models.context`).
    cfg       auto, on, off: the two branches of guidance each on half of the ranks.
    mesh      a process group or DeviceMesh; all ranks by default.
    check     first: in the first forward, sampled rows of each attention are computed again and compared;
              always: and the values of the inputs are compared over the ranks in each forward, not in the
              1st, 2nd, 4th, 8th, … alone.
    backend   the attention kernel, with and without masks: see `weft.run.kernels`. exact computes in float32,
              so that its result does not depend on the number of ranks.
    adapter   for a model that weft does not know: see `weft.models.adapter`.

    Models must be on the device of their rank, `weft.device()`; two ranks on one GPU are refused.
    In training, gradients are those of DDP: the mean over the ranks is the gradient.
    """
    if check not in CHECKS:
        raise InputError(f"check={check!r} is none of {', '.join(CHECKS)}.")
    check_backend(backend)
    _refuse_others(target)
    world, woven = _world(mesh), Woven()
    try:
        for name, model in _transformers(target).items():
            _refuse_others(model)
            if world.comm.size > 1:
                _check_device(name, model, world)
            said, guidance = adapter or adapter_of(model), Guidance.of(model, mesh, cfg)
            if world.comm.size > 1 or sparse is not None:  # else there is nothing to do
                sparsity = None if sparse is None else sparse_attention(sparse)
                guidance.batched = not getattr(sparsity, "changes", False)
                how = {
                    "name": name,
                    "plan": plan if sparse is None else _plan(plan, mesh),
                    "sparsity": sparsity,
                    "backend": backend,
                    "clock": woven.clock,
                    "tells": world.comm.rank == 0,
                }
                region = _region(model, said, check=check, **how)
                inputs = Comparison(type(model).__name__, parameters(model), always=check == "always")
                woven.weave(name, model, region, guidance, partial(inputs, world, model))
        if not isinstance(target, nn.Module) and woven.regions:
            woven.around(target, world)
    except BaseException:
        woven.undo()
        raise
    woven.mark(target)
    return target


def restore(target: Any) -> Any:
    """Take off what `parallelize` put on."""
    woven = getattr(target, "_weft", None)
    if woven is None:
        raise InputError(f"This {type(target).__name__} is not parallelized.")
    woven.undo()
    return target


class Woven:
    """What was put on a pipeline or a model."""

    def __init__(self) -> None:
        self.regions: dict[str, Region | Switching] = {}
        self.clock = Clock()
        self._guidance: list[Guidance] = []
        self._undo: list[Callable[[], Any]] = []

    def weave(
        self, name: str, model: nn.Module, region: Region | Switching, guidance: Guidance, compared: Any
    ) -> None:
        """Let a model's forward be that of its region, under guidance, for inputs that were compared."""
        self.regions[name] = region
        self._guidance.append(guidance)
        self._undo.append(region.remove)

        def forward(*args: Any, **kwargs: Any) -> Any:
            # A pipeline that is called has compared its arguments, and its ranks draw the same numbers.
            with compared(args, kwargs, values=not self.clock.is_told):
                return guidance(region.run, args, kwargs)

        # Blocks are compiled; what goes on around them is not.
        forward._torchdynamo_disable = True  # type: ignore[attr-defined]
        self._undo.append(put(model, "forward", forward))
        self.mark(model)

    def mark(self, what: Any) -> None:
        """Nobody else may split it."""
        self._undo.append(put(what, "_weft", self))

    def around(self, pipe: Any, world: World) -> None:
        """A pipeline draws rank 0's random numbers, and decodes on all ranks."""
        plain, woven = type(pipe), self

        @wraps(plain.__call__)
        def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it becomes one
            share_numbers(world, (args, kwargs))
            woven.begin(_steps(plain.__call__, self, args, kwargs), getattr(self, "scheduler", None))
            try:
                return plain.__call__(self, *args, **kwargs)
            finally:
                woven.end(tell=world.comm.rank == 0)

        body = {"__call__": __call__, "__module__": plain.__module__, "__doc__": plain.__doc__}
        pipe.__class__ = type(plain.__name__, (plain,), body)
        self._undo.append(partial(setattr, pipe, "__class__", plain))
        if isinstance(vae := getattr(pipe, "vae", None), nn.Module):
            self._undo.append(spread(vae, world).remove)

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

    def end(self, *, tell: bool) -> None:
        """A run is over: its plans are saved, its calls forgotten, what its masks left out is told."""
        self.clock.reset()
        for world, _ in self.worlds():
            world.planner.save()
        for guidance in self._guidance:
            guidance.forget()
        if not tell:
            return
        for sparsity in self.sparsities:
            sys.stderr.write(f"weft: {sparsity.summary()}\n")
        if self.sparsities and hasattr(trace.active, "keep_plans"):
            trace.active.keep_plans(explained(self))  # type: ignore[union-attr]

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _world(mesh: Any) -> World:
    world = world_of(mesh, 60.0)
    if mesh is None and world.comm.size == 1 and is_launched():
        raise InputError(
            "This process was started as one of several ranks, but its process group has one rank.",
            hint="Leave init_process_group to weft, or give it the world size that the launcher set.",
        )
    return world


def _check_device(name: str, model: nn.Module, world: World) -> None:
    """Refuse ranks that share a GPU, before anything is put on the model."""
    device = next((weight.device for weight in model.parameters()), torch.device("cpu"))
    # Offloaded models lie on the CPU too; their hooks move them when they are called.
    is_offloaded = hasattr(model, "_hf_hook") or hasattr(model, "_diffusers_hook")
    if device.type == "cpu" and torch.cuda.is_available() and not is_offloaded and world.comm.rank == 0:
        warnings.warn(
            f"{name} is on the CPU and will run there, though this machine has GPUs. To use them, call "
            "pipe.to(weft.device()) before weft.parallelize(pipe).",
            stacklevel=3,
        )
    check_devices(world.comm, device)


def _plan(plan: Any, mesh: Any) -> Any:
    """The axes of a mesh may name a plan."""
    return (axes_of(mesh) if plan == "auto" else None) or plan


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


def _transformers(target: Any) -> dict[str, nn.Module]:
    """The models of a pipeline that weft splits, by name; a model is one."""
    if isinstance(target, nn.Module):
        return {type(unwrapped(target)).__name__: unwrapped(target)}
    parts = getattr(target, "components", None)
    if not isinstance(parts, dict):
        raise InputError(
            f"weft.parallelize was given a {type(target).__name__}.",
            hint="Give it a Diffusers pipeline, or a torch module.",
        )
    models = {name: unwrapped(part) for name, part in parts.items() if isinstance(part, nn.Module)}
    known = {name: model for name, model in models.items() if "transformer" in name or knows(model)}
    if not known:
        raise InputError(
            f"A {type(target).__name__} has no transformer; its parts are {', '.join(models) or 'none'}.",
            hint="weft splits Diffusion Transformers; `weft models` lists those that it knows.",
        )
    return known


def _refuse_others(model: Any) -> None:
    """A model can be split once."""
    if getattr(model, "_parallel_config", None) is not None:
        raise InputError(
            f"Diffusers' own parallelism is enabled on this {type(model).__name__}.",
            hint="Call weft.parallelize instead of enable_parallelism, on a model loaded anew.",
        )
    if getattr(model, "_weft", None) is not None:
        raise InputError(
            f"This {type(model).__name__} is parallelized already.", hint="weft.restore it first."
        )
