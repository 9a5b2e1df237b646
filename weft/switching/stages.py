"""`weft.stages`: declare which dims the modules of a model mix, and it runs with its sequence sharded.

    weft.stages(
        model,
        {"blocks.*.spatial": "space", "blocks.*.temporal": "time"},
        dims="batch time space channel",
    )

Before each stage the tensor is redistributed as `weft.plan.stage_layouts` finds cheapest; the first stage
gets its shard of the whole tensor, the last one's output is gathered. Between stages code must be pointwise.
Declarations are tested before the 1st, 2nd, 4th, 8th, … forward: `weft.switching.stage_probe`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from math import prod

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import PyTree

from weft.core.errors import InputError
from weft.core.mesh import Mesh
from weft.hooks.input_check import Comparison, is_recomputing
from weft.hooks.module_tree import forward_parameters, module_at
from weft.hooks.wrap import (
    WRAPPER,
    Args,
    Forward,
    ForwardWrapper,
    Kwargs,
    is_wrapped,
    unwrap_module,
    wrap_module,
)
from weft.plan.stage_layouts import WHOLE, StageLayouts, State, choose_layouts
from weft.run.world import MeshLike, World, world_of
from weft.switching.activation import ShardedActivation
from weft.switching.declare import (
    Declared,
    Mixes,
    StageCall,
    StageModule,
    check_apart,
    find_stages,
    modules_between,
)
from weft.switching.dropout_mode import DropoutMode
from weft.switching.stage_hooks import StageHook
from weft.switching.stage_probe import check_mixing

CHECKS = ("always", "none")

__all__ = ["Mixes", "Stages", "stages"]

Meshes = MeshLike | Sequence[MeshLike]


def stages(
    model: nn.Module,
    declared: Declared | Sequence[Declared],
    *,
    dims: str,
    shard: str = "",
    mesh: Meshes = None,
    exit: str = WHOLE,
    check: str = "none",
) -> Stages:
    """Shard the tensor that passes through the stages of a model; the model is wrapped.

    declared   names of submodules, where * is any one component of a name, with the dims that each mixes. One
               dict is one loop: its entries run in turn, layer by layer. Several loops are a list of dicts.
    dims       the dims of the tensor: the first tensor argument, and the first output, of each stage.
    shard      those that may be sharded; by default all but the first and the last.
    mesh       a process group or DeviceMesh; one of several axes shards as many dims at once.
    exit       the placement of the output: whole, or sharded by a dim (one for each axis).
    check      always: the values of the inputs are compared over the ranks in each forward, not in the
               1st, 2nd, 4th, 8th, … alone.

    Every rank passes the same input to the model, which is compared (`weft.hooks.input_check`). Gradients:
    see `weft.switch`; of a gathered output, the mean over the ranks is the gradient, as with DDP.

    >>> model = nn.Sequential(nn.Identity(), nn.Identity())
    >>> handle = stages(model, {"0": "space", "1": "time"}, dims="batch time space channel")
    >>> model(torch.zeros(1, 5, 7, 2)).shape
    torch.Size([1, 5, 7, 2])
    >>> handle.remove()
    """
    if check not in CHECKS:
        raise InputError(f"check must be one of {', '.join(CHECKS)}, got {check!r}.")
    handle = Stages(model, declared, dims=dims, shard=shard, mesh=mesh, exit=exit)
    handle.wrap_model(mesh, always=check == "always")
    return handle


class Stages(ForwardWrapper):
    """Redistributes a tensor between the stages of a model; `remove` undoes it."""

    def __init__(
        self,
        model: nn.Module,
        declared: Declared | Sequence[Declared],
        *,
        dims: str,
        shard: str,
        mesh: Meshes,
        exit: str = WHOLE,
    ) -> None:
        loops = [declared] if isinstance(declared, Mapping) else list(declared)
        names, self._exit = dims.split(), tuple(exit.split())
        self.shard = tuple(shard.split() or names[1:-1])
        if unknown := [dim for dim in (*self.shard, *self._exit) if dim not in (*names, WHOLE)]:
            raise InputError(f"There is no dim {unknown[0]!r}.", hint=f"The dims are {', '.join(names)}.")
        self.model = model
        self.modules = [stage for loop in loops for stage in find_stages(model, loop, names)]
        check_apart(self.modules)
        if not self.modules or len(set(names)) < len(names):
            raise InputError(
                f"There are {len(self.modules)} stages with the dims {dims!r}.",
                hint="Declare one, name dims once.",
            )
        self.sizes: dict[str, int] = {}
        """Of the whole tensor, to be set where the first stage has several dims in one."""
        self.route: StageLayouts | None = None
        """The placements for the last input."""
        self.activation = ShardedActivation(names, _worlds(mesh))
        self.dropout = DropoutMode(self.activation)
        self.placements: dict[StageHook, State] = {}
        """The placement of the tensor where each module began to run in the last forward."""
        self._routes: dict[tuple[int | str, ...], StageLayouts] = {}
        self._comparisons: dict[World, Comparison] = {}
        self._next = 0
        self._runs = 0
        self.is_running = False
        """Whether the model's forward runs: else a stage is called alone, or recomputed for its gradients."""
        self.hooks = {stage.name: StageHook(self, stage.module, at) for at, stage in enumerate(self.modules)}
        if wrapped := [name for name, hook in self.hooks.items() if WRAPPER in vars(hook.module)]:
            raise InputError(f"Stage {wrapped[0]} is sharded already.", hint="Call remove() first.")
        for name, module in modules_between(model, self.modules):
            if WRAPPER not in vars(module):
                self.hooks[name] = StageHook(self, module)
        for hook in self.hooks.values():
            wrap_module(hook.module, hook)

    def wrap_model(self, mesh: Meshes, *, always: bool) -> None:
        """Wrap the model itself and its copies; compare its inputs over all ranks that it is sharded over."""
        name, order = type(self.model).__name__, forward_parameters(self.model)
        worlds = (world_of(axis, 60.0) for axis in _axes(mesh))
        self._comparisons = {world: Comparison(name, order, always=always) for world in worlds}
        for wrapper in (self, *self.hooks.values()):
            wrapper.is_copied = True
        wrap_module(self.model, self)

    def remove(self) -> None:
        for hook in self.hooks.values():
            unwrap_module(hook.module)
        if vars(self.model).get(WRAPPER) is self:
            unwrap_module(self.model)

    def is_current(self) -> bool:
        """Return whether the stages are still the model's modules, and wrapped."""
        return all(
            module_at(self.model, stage.name) is stage.module
            and is_wrapped(stage.module, self.hooks[stage.name])
            for stage in self.modules
        )

    def around(self, forward: Forward, args: Args, kwargs: Kwargs) -> PyTree:
        """Run the model's forward."""
        self.activation.placement, self.placements = self.activation.replicated, {}
        with ExitStack() as stack:
            for world, comparison in self._comparisons.items():
                stack.enter_context(comparison(world, self.model, args, kwargs))
            stack.enter_context(self.dropout.forward_of(self.model))
            unprobed = None if is_recomputing() else self._check_mixing(forward, args, kwargs)
            self.is_running = True
            stack.callback(setattr, self, "is_running", False)  # noqa: FBT003
            out = forward(*args, **kwargs)
        if unprobed is not None:
            self._runs = 0  # the next forward is probed again
            raise unprobed
        return out

    def _check_mixing(self, forward: Forward, args: Args, kwargs: Kwargs) -> InputError | None:
        """Test the declarations, before some forwards."""
        self._runs += 1
        if self._runs & (self._runs - 1):
            return None
        self.dropout.is_probing = True
        try:
            return check_mixing(self, forward, args, kwargs)
        finally:
            self.dropout.is_probing = False

    def enter(self, at: int, call: StageCall) -> StageCall:
        """Return the call of a stage with its tensor redistributed."""
        stage = self.modules[at]
        self.check_order(at)
        if at == 0 and (self.is_running or not is_recomputing()):
            self.route = self.measured(stage, call.x)
        assert self.route is not None
        self.check_samples(at, call)
        self.activation.placement = self.route.layouts[at - 1] if at else self.activation.replicated
        x = self.activation.unfold(stage, call.x)
        x = self.activation.redistribute(x, self.route.moves[at], f"Stage {stage.name}")
        self.dropout.groups = stage.groups
        return call.with_tensor(self.activation.fold(stage, x))

    def leave(self, at: int, call: StageCall, out: PyTree) -> PyTree:
        """Check the output of a stage; redistribute that of the last one."""
        assert self.route is not None
        stage = self.modules[at]
        self.dropout.groups = tuple((dim,) for dim in self.activation.dims)
        y = out[0] if isinstance(out, tuple) else out
        if not isinstance(y, Tensor) or y.shape != call.x.shape:
            shape = list(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
            raise InputError(
                f"Stage {stage.name} turns a tensor of shape {list(call.x.shape)} into {shape}.",
                hint="The first output of a stage must have the shape of its first input.",
            )
        if at < len(self.modules) - 1:
            return out
        y = self.activation.unfold(stage, y)
        y = self.activation.redistribute(y, self.route.moves[-1], f"The end, after {stage.name}")
        y = self.activation.fold(stage, y)
        self._restore_in_backward(y)
        return (y, *out[1:]) if isinstance(out, tuple) else y

    def _restore_in_backward(self, out: Tensor) -> None:
        """Let modules that are recomputed for the gradients of an output see the sizes of this forward."""
        state = self.route, self.activation.sizes, self.placements

        def restore(_: Tensor) -> None:
            self.route, self.activation.sizes, self.placements = state

        if out.requires_grad:
            out.register_hook(restore)

    def check_samples(self, at: int, call: StageCall) -> None:
        """Reject other arguments that have a row for each sample, where samples are sharded."""
        assert self.route is not None
        batch, sizes = self.activation.dims[0], self.activation.sizes
        others = {sizes[dim] for dim in self.shard if dim != batch}
        if batch not in self.route.layouts[at] or sizes[batch] in others:
            return
        for name, value in (*enumerate(call.args), *call.kwargs.items()):
            is_other = name != call.at and isinstance(value, Tensor) and value.dim() > 0
            if is_other and value.shape[0] == sizes[batch] > 1:
                raise InputError(
                    f"Stage {self.modules[at].name} got a second tensor of shape {list(value.shape)}, "
                    f"with a row for each of {batch}, which is sharded.",
                    hint=f"Leave {batch} out of shard, or compute it from the first inside the stage.",
                )

    def measured(self, stage: StageModule, x: Tensor) -> StageLayouts:
        """Return the placements of a whole tensor in the stages."""
        self.activation.measure(stage, x, self.sizes)
        sizes = self.activation.sizes
        key = (*sizes.values(), x.element_size(), *self.shard)
        if key not in self._routes:
            mixes = [tuple(dim for dim in each.stage.mixes if dim in self.shard) for each in self.modules]
            self._routes[key] = choose_layouts(
                [replace(each.stage, mixes=dims) for each, dims in zip(self.modules, mixes, strict=True)],
                {dim: sizes[dim] for dim in self.shard},
                [world.comm.size for world in self.activation.worlds],
                width=x.element_size() * prod(size for dim, size in sizes.items() if dim not in self.shard),
                exit=self._exit if len(self._exit) > 1 else "".join(self._exit),
            )
        return self._routes[key]

    def check_order(self, at: int) -> None:
        """Require that stages run in the order in which they were declared."""
        if is_recomputing():
            return
        if at not in (0, self._next):
            expected = self.modules[self._next].name if self._next < len(self.modules) else "nothing"
            raise InputError(
                f"Stage {self.modules[at].name} ran where the declaration expects {expected}.",
                hint="One dict is one loop, whose entries run in turn; pass a list of dicts for more.",
            )
        self._next = at + 1


def _axes(mesh: Meshes) -> Sequence[MeshLike]:
    if mesh is None or isinstance(mesh, World | Mesh | DeviceMesh | ProcessGroup):
        return [mesh]
    return mesh


def _worlds(mesh: Meshes) -> tuple[World, ...]:
    """Return one world for each axis."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
        world_of(mesh, 60.0)  # raises if it has no names
        mesh = [mesh[name] for name in mesh.mesh_dim_names or ()]
    return tuple(world_of(axis, 60.0) for axis in _axes(mesh))
