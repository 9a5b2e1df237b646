"""`weft.stages`: say which dims the parts of a model mix, and it runs with its sequence sharded.

    weft.stages(
        model,
        {"blocks.*.spatial": "space", "blocks.*.temporal": "time"},
        dims="batch time space channel",
    )

Before each stage the tensor is switched as `plan.stages.place` found cheapest; the first stage gets its part
of the whole tensor, the last one's output is gathered. All that lies between stages must be pointwise.
What is declared is tested, before the 1st, 2nd, 4th, 8th, … forward: `weft.models.rehearsal`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from weft.core.errors import InputError
from weft.models.adapter import parameters
from weft.models.draws import Draws
from weft.models.rehearsal import refuse_mixing
from weft.models.same import Comparison, is_recomputing
from weft.models.sites import Call, Declared, Mixes, Site, beside, check_apart, find_sites
from weft.models.stream import Stream
from weft.plan.stages import WHOLE, Route, State, place
from weft.run.world import World, world_of

CHECKS = ("always", "none")

__all__ = ["Mixes", "Stages", "stages"]


def stages(
    model: nn.Module,
    declared: Declared | Sequence[Declared],
    *,
    dims: str,
    shard: str = "",
    mesh: Any = None,
    exit: str = WHOLE,
    check: str = "none",
) -> Stages:
    """Shard the tensor that runs through the stages of a model; the model gets hooks.

    declared   names of submodules, where * is any one part of a name, with the dims that each mixes. One dict
               is one loop: its entries run in turn, layer by layer. Several loops are a list of dicts.
    dims       the dims of the tensor: the first tensor argument, and the first output, of each stage.
    shard      those that may be sharded; by default all but the first and the last.
    mesh       a process group or DeviceMesh; one of several axes shards as many dims at once.
    exit       how the output is left: whole, or sharded by a dim (one for each axis).
    check      always: the values of the inputs are compared over the ranks in each forward, not in the
               1st, 2nd, 4th, 8th, … alone.

    Every rank gives the model the same input, which is compared (`weft.models.same`). Gradients: see
    `weft.switch`; of a gathered output, the mean over the ranks is the gradient, as with DDP.
    """
    if check not in CHECKS:
        raise InputError(f"check={check!r} is none of {', '.join(CHECKS)}.")
    loops = [declared] if isinstance(declared, Mapping) else list(declared)
    names, leave = dims.split(), tuple(exit.split())
    cut = tuple(shard.split() or names[1:-1])
    if unknown := [dim for dim in (*cut, *leave) if dim not in (*names, WHOLE)]:
        raise InputError(f"There is no dim {unknown[0]!r}.", hint=f"The dims are {', '.join(names)}.")
    sites = [site for loop in loops for site in find_sites(model, loop, names, cut)]
    check_apart(sites)
    if not sites or len(set(names)) < len(names):
        raise InputError(
            f"There are {len(sites)} stages with the dims {dims!r}.", hint="Declare one, name dims once."
        )
    found = Stages(model, sites, Stream(names, _worlds(mesh)), cut, leave)
    found.compare(model, mesh, always=check == "always")
    return found


class Stages:
    """What switches between the stages of a model; `remove` takes it off again."""

    def __init__(
        self, model: nn.Module, sites: list[Site], stream: Stream, shard: tuple[str, ...], leave: State
    ) -> None:
        self.sizes: dict[str, int] = {}
        """Of the whole tensor, to be told where the first stage has several dims in one."""
        self.route: Route | None = None
        """What was decided for the last input."""
        self._model = model
        self._sites, self._stream, self._shard, self._leave = sites, stream, shard, leave
        self._known: dict[tuple[int, ...], Route] = {}
        self._next = 0
        self._runs = 0
        self._probing = False
        self._draws, self._drawing = Draws(stream, lambda: self._probing), ExitStack()
        between = list(beside(model, sites))
        self._hooks = [
            hook
            for module in (*(site.module for site in sites), *dict(between).values())
            for hook in self._draws.hooks(module)
        ]
        self._hooks += [
            hook
            for at, site in enumerate(sites)
            for hook in (
                site.module.register_forward_pre_hook(self._before(at), with_kwargs=True),
                site.module.register_forward_hook(self._after(at), with_kwargs=True),
            )
        ]
        self._hooks += [
            model.register_forward_pre_hook(lambda *_: self._begin(model)),
            model.register_forward_hook(lambda *_: self._end(), always_call=True),
            model.register_forward_pre_hook(self.rehearse, with_kwargs=True),
        ]

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def compare(self, model: nn.Module, mesh: Any, *, always: bool) -> None:
        """Compare the inputs of the model over all ranks that it is sharded over."""
        name, order, under_way = type(model).__name__, parameters(model), ExitStack()
        worlds = self._stream.worlds if isinstance(mesh, list | tuple) else (world_of(mesh, 60.0),)
        comparisons = {world: Comparison(name, order, always=always) for world in worlds}

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
            if kwargs is None:
                return  # another hook of this forward has taken this one off
            under_way.pop_all()  # of a forward that has failed
            for world, comparison in comparisons.items():
                under_way.enter_context(comparison(world, model, args, kwargs))

        self._hooks += [
            model.register_forward_pre_hook(begin, with_kwargs=True),
            model.register_forward_hook(lambda *_: under_way.close()),
        ]

    def _begin(self, model: nn.Module) -> None:
        """What the model is given is whole."""
        self._stream.layout = self._stream.whole
        if not self._probing:  # a rehearsal is within a forward that has begun
            self._drawing = self._draws.begin(model)

    def _end(self) -> None:
        if not self._probing:
            self._drawing.close()

    def _before(self, at: int) -> Any:
        site = self._sites[at]

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if self._probing:
                return None
            call = _call(site, args, kwargs)
            self._count(at)
            if at == 0:
                self.route = self._measured(site, call.x)
            assert self.route is not None
            self.refuse_samples(at, call)
            self._stream.layout = self.route.layouts[at - 1] if at else self._stream.whole
            x = self._stream.move(
                self._stream.apart(site, call.x), self.route.moves[at], f"Stage {site.name}"
            )
            self._draws.groups = site.groups
            return call.given(self._stream.together(site, x))

        return hook

    def _after(self, at: int) -> Any:
        site = self._sites[at]

        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
            if self._probing:
                return None
            assert self.route is not None
            self._draws.groups = tuple((dim,) for dim in self._stream.dims)
            call = _call(site, args, kwargs)
            y = out[0] if isinstance(out, tuple) else out
            if not isinstance(y, Tensor) or y.shape != call.x.shape:
                found = list(y.shape) if isinstance(y, Tensor) else f"a {type(y).__name__}"
                raise InputError(
                    f"Stage {site.name} turns a tensor of shape {list(call.x.shape)} into {found}.",
                    hint="The first output of a stage must have the shape of its first input.",
                )
            if at < len(self._sites) - 1:
                return None
            y = self._stream.move(
                self._stream.apart(site, y), self.route.moves[-1], f"The end, after {site.name}"
            )
            y = self._stream.together(site, y)
            return (y, *out[1:]) if isinstance(out, tuple) else y

        return hook

    def rehearse(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        """Find out, before some forwards, whether what is declared is right."""
        if kwargs is None or is_recomputing():
            return
        self._runs += 1
        if self._runs & (self._runs - 1):
            return
        self._probing = True
        try:
            refuse_mixing(self, args, kwargs)
        finally:
            self._probing = False
            self._stream.layout = self._stream.whole

    def refuse_samples(self, at: int, call: Call) -> None:
        """Refuse other arguments that have a row for each sample, where samples are sharded."""
        assert self.route is not None
        batch, sizes = self._stream.dims[0], self._stream.sizes
        others = {sizes[dim] for dim in self._shard if dim != batch}
        if batch not in self.route.layouts[at] or sizes[batch] in others:
            return
        for name, value in (*enumerate(call.args), *call.kwargs.items()):
            is_other = name != call.at and isinstance(value, Tensor) and value.dim() > 0
            if is_other and value.shape[0] == sizes[batch] > 1:
                raise InputError(
                    f"Stage {self._sites[at].name} is given a second tensor of shape {list(value.shape)}, "
                    f"with a row for each of {batch}, which is sharded.",
                    hint=f"Leave {batch} out of shard, or make that tensor of the first one in the stage.",
                )

    def _measured(self, site: Site, x: Tensor) -> Route:
        """The way of a whole tensor through the stages."""
        self._stream.measure(site, x, self.sizes)
        return self._place(x.element_size())

    def _place(self, item_bytes: int) -> Route:
        sizes = self._stream.sizes
        key = (*sizes.values(), item_bytes)
        if key not in self._known:
            self._known[key] = place(
                [site.stage for site in self._sites],
                {dim: sizes[dim] for dim in self._shard},
                [world.comm.size for world in self._stream.worlds],
                width=item_bytes * prod(size for dim, size in sizes.items() if dim not in self._shard),
                exit=self._leave if len(self._leave) > 1 else "".join(self._leave),
            )
        return self._known[key]

    def _count(self, at: int) -> None:
        """Stages run in the order in which they were declared."""
        if is_recomputing():
            return
        if at not in (0, self._next):
            wanted = self._sites[self._next].name if self._next < len(self._sites) else "nothing"
            raise InputError(
                f"Stage {self._sites[at].name} runs where {wanted} was declared to run.",
                hint="One dict is one loop, whose entries run in turn; give a list of dicts for several.",
            )
        self._next = at + 1


def _call(site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    call = Call.find(args, kwargs)
    if call is None:
        raise InputError(f"Stage {site.name} is given no tensor.")
    return call


def _worlds(mesh: Any) -> tuple[World, ...]:
    """One for each axis."""
    if isinstance(mesh, DeviceMesh) and mesh.ndim > 1:
        world_of(mesh, 60.0)  # raises if it has no names
        mesh = [mesh[name] for name in mesh.mesh_dim_names or ()]
    axes = mesh if isinstance(mesh, list | tuple) else [mesh]
    return tuple(world_of(axis, 60.0) for axis in axes)
