"""`weft.parallelize`: a Diffusers pipeline or transformer runs with its tokens split over the ranks.

    pipe = weft.parallelize(pipe.to(weft.device()))   # under torchrun, or: weft run script.py --ranks 4
    weft.restore(pipe)

The pipeline is called as before, with the same arguments on every rank, and returns the same on all.
"""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch
from torch import nn

from weft.core.backends import check_backend
from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.diffusers.adapter import Adapter
from weft.diffusers.adapters import find_adapter
from weft.diffusers.checks import PlanSpec
from weft.diffusers.handle import ParallelHandle, ParallelOptions, handle_of
from weft.hooks.module_tree import unwrapped
from weft.hooks.wrap import Target
from weft.run.devices import check_devices
from weft.run.world import MeshLike, World, is_launched, world_of
from weft.sparse.context import SparseAttention

T = TypeVar("T")

CHECKS = ("always", "first", "none")


def parallelize(  # noqa: PLR0913 - the one call of users
    target: T,
    *,
    plan: PlanSpec = "auto",
    sparse: str | BlockMask | SparseAttention | None = None,
    cfg: str = "auto",
    mesh: MeshLike = None,
    check: str = "none",
    backend: str = "auto",
    adapter: Adapter | None = None,
) -> T:
    """Split the tokens of a pipeline's transformers, or of one transformer, over the ranks; return it.

    plan      how attention is split: see `weft.attention`. One that does not fit the ranks is refused here.
    sparse    sparse attention: a name such as sta:window=3x3x3, svg, radial or topk:0.2, as in
              `weft.attention(mask=…)`, on the grid of the model's input; a BlockMask on that grid; or an
              object with mask(ctx, q, k) (`weft.sparse.context`).
    cfg       auto, on, off: the two branches of guidance each on half of the ranks.
    mesh      a process group or DeviceMesh; all ranks by default.
    check     first: in the first forward, sampled rows of each attention are computed again and compared;
              always: and the values of the inputs are compared over the ranks in each forward, not in the
              1st, 2nd, 4th, 8th, … alone.
    backend   the attention kernel, with and without masks: see `weft.run.kernels`. exact computes in float32,
              so that its result does not depend on the number of ranks.
    adapter   for a model without one: see `weft.diffusers.adapter`.

    Models must be on the device of their rank, `weft.device()`; two ranks on one GPU raise an error.
    In training, gradients are those of DDP: the mean over the ranks is the gradient.

        pipe = weft.parallelize(pipe, sparse="sta")

    A transformer alone, here on one rank, which has nothing to split:

    >>> from weft.video.transformer import DiTConfig, VideoDiT
    >>> model = VideoDiT(DiTConfig(words=8, length=2, depth=1))
    >>> parallelize(model) is model
    True
    """
    if check not in CHECKS:
        raise InputError(f"check must be one of {', '.join(CHECKS)}, got {check!r}.")
    check_backend(backend)
    _check_not_parallel(target)
    options = ParallelOptions(plan, sparse, cfg, mesh, check, backend, adapter)
    world, handle = _world(mesh), ParallelHandle(options)
    pipe: Target = target
    try:
        for name, model in _transformers(target).items():
            _check_not_parallel(model)
            if world.comm.size > 1:
                _check_device(name, model, world)
            handle.apply(name, model)
        if not isinstance(target, nn.Module) and handle.regions:
            handle.share(pipe, decodes=True)
    except BaseException:
        handle.undo()
        raise
    handle.mark(target)
    return target


def restore(target: T) -> T:
    """Undo `parallelize`; return the same pipeline or model.

    >>> from weft.video.transformer import DiTConfig, VideoDiT
    >>> model = VideoDiT(DiTConfig(words=8, length=2, depth=1))
    >>> restore(parallelize(model)) is model
    True
    """
    handle = handle_of(target)
    if handle is None:
        raise InputError(f"This {type(target).__name__} is not parallelized.")
    handle.undo()
    return target


def _world(mesh: MeshLike) -> World:
    world = world_of(mesh, 60.0)
    if mesh is None and world.comm.size == 1 and is_launched():
        raise InputError(
            "This process was started as one of several ranks, but its process group has one rank.",
            hint="Leave init_process_group to weft, or pass it the world size that the launcher set.",
        )
    return world


def _check_device(name: str, model: nn.Module, world: World) -> None:
    """Reject ranks that share a GPU, before anything is applied to the model."""
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


def _transformers(target: Target) -> dict[str, nn.Module]:
    """Return the models of a pipeline that weft splits, by name; a model is one."""
    if isinstance(target, nn.Module):
        return {type(unwrapped(target)).__name__: unwrapped(target)}
    components = getattr(target, "components", None)
    if not isinstance(components, dict):
        raise InputError(
            f"weft.parallelize needs a Diffusers pipeline or a torch module, got a {type(target).__name__}.",
        )
    models = {name: unwrapped(each) for name, each in components.items() if isinstance(each, nn.Module)}
    supported = {
        name: model for name, model in models.items() if "transformer" in name or find_adapter(model)
    }
    if not supported:
        raise InputError(
            f"A {type(target).__name__} has no transformer; its parts are {', '.join(models) or 'none'}.",
            hint="weft splits Diffusion Transformers; `weft models` lists those that have an adapter.",
        )
    return supported


def _check_not_parallel(model: Target) -> None:
    """Require that nothing splits the model already."""
    if getattr(model, "_parallel_config", None) is not None:
        raise InputError(
            f"Diffusers' own parallelism is enabled on this {type(model).__name__}.",
            hint="Call weft.parallelize instead of enable_parallelism, on a model loaded anew.",
        )
    if handle_of(model) is not None:
        raise InputError(
            f"This {type(model).__name__} is parallelized already.", hint="weft.restore it first."
        )
