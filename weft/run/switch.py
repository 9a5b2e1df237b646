"""`weft.switch` and its kin: a tensor that is sharded by one named dim becomes sharded by another.

    GRID = {"batch": None, "time": 17, "space": 1024, "channel": None}   # all dims in order, whole sizes
    x = weft.split(x, "time", dims=GRID)             whole → this rank's part of time          no bytes
    x = weft.switch(x, "time", "space", dims=GRID)   time → space                  M/N · (N-1)/N a rank
    x = weft.gather(x, "space", dims=GRID)           space → whole                 M/N · (N-1)   a rank

Shards are as even as can be; some are empty where a dim is shorter than there are ranks.

Gradients: the world's loss is the sum of the ranks' losses, and each backward is the exact adjoint: that
of a switch is the switch back; of a gather, everybody's gradient of my shard is sent to me and added;
of a split, my part's gradient among zeros. So a whole tensor's gradient, like a replicated parameter's,
is partial on each rank, and the sum over the ranks is the gradient. If every rank computes the same
loss from a gathered output, that loss counts N times: take the mean over the ranks instead, as DDP does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from weft.core.errors import InputError
from weft.core.layout import Layout
from weft.core.problem import ITEM_BYTES, Switch
from weft.core.schedule import Schedule
from weft.run import trace
from weft.run.agree import agree, refuse
from weft.run.redistribute import Flight, Redistribution
from weft.run.transforms import is_transformed, refuse_export, refused, unmapped
from weft.run.world import World, world_of
from weft.schedule.switch import switch as switch_schedule

Dims = Mapping[str, int | None]
"""Every dim of a tensor in order, with the size of the whole; None where it does not matter."""

REDISTRIBUTIONS = 1024  # of each world: shapes that are served in turn must not pile up
_redistributions: WeakKeyDictionary[World, dict[Any, Redistribution]] = WeakKeyDictionary()


def switch(
    x: Tensor,
    source: str,
    target: str,
    *,
    dims: Dims,
    mesh: Any = None,
    stage: str = "",
    async_op: bool = False,
) -> Any:
    """This rank's part of `target` of a tensor of which it has its part of `source`.

    mesh       a process group, a DeviceMesh or one axis of it; all ranks by default. On a mesh of two
               axes x may be sharded by two dims; the one that stays is None in `dims`.
    stage      what errors call the place in the model.
    async_op   return at once; the tensor is what `wait()` of the result returns, until when x must not
               be written.
    """
    request = _Request(x, dims, mesh, stage or f"switch {source} → {target}")
    redistribution = request.redistribution(source, target)
    if not async_op:
        return _Move.apply(x, redistribution, None)
    # What is traced or transformed is run as a whole, when it is waited for.
    waits = trace.active is not None or is_transformed()
    return Pending(x, redistribution, None if waits else redistribution.start(x.detach()))


def gather(x: Tensor, source: str, *, dims: Dims, mesh: Any = None, stage: str = "") -> Tensor:
    """The whole tensor, on every rank, of which each has its part of `source`."""
    request = _Request(x, dims, mesh, stage or f"gather {source}")
    return _Gather.apply(x, request.redistribution(source, None), None)  # pyright: ignore[reportReturnType]


def everyone(x: Tensor, *, mesh: Any = None, stage: str = "") -> Tensor:
    """[ranks, …]: the equally large tensors of all ranks, on each of them."""
    ranks = world_of(mesh, 60.0).comm.size
    dims = {"rank": ranks} | {f"dim {at}": size for at, size in enumerate(x.shape)}
    return gather(x[None].contiguous(), "rank", dims=dims, mesh=mesh, stage=stage)


def reduce(x: Tensor, target: str, *, dims: Dims, mesh: Any = None, stage: str = "") -> Tensor:
    """This rank's part of `target` of the sum of all ranks' whole tensors: what a gather is backward."""
    shard = split(x, target, dims=dims, mesh=mesh, stage=stage)
    redistribution = _Request(shard, dims, mesh, stage or f"reduce {target}").redistribution(target, None)
    return _Move.apply(x, redistribution.adjoint, None)  # pyright: ignore[reportReturnType]


def split(x: Tensor, target: str, *, dims: Dims, mesh: Any = None, stage: str = "") -> Tensor:
    """This rank's part of `target` of a tensor that every rank has whole; nothing is sent."""
    request = _Request(x, dims, mesh, stage or f"split {target}")
    at = request.position(target)
    request.check_shape(None)
    ((start, stop),) = request.layout(target, x.shape[at]).shards[request.rank] or ((0, 0),)
    return x.narrow(at, start, stop - start).contiguous()


def keep(x: Tensor, source: str, *, dims: Dims, mesh: Any = None, stage: str = "") -> Tensor:
    """x as it is, if it can be this rank's part of `source`; else it raises."""
    request = _Request(x, dims, mesh, stage or f"keep {source}")
    request.position(source)
    request.check_shape(source)
    return x


class Pending:
    """A switch under way."""

    def __init__(self, x: Tensor, redistribution: Redistribution, flight: Flight | None) -> None:
        self._x, self._mover, self._flight = x, redistribution, flight
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            self._result = _Move.apply(self._x, self._mover, self._flight)  # pyright: ignore
            del self._x, self._flight
        return self._result  # pyright: ignore[reportReturnType]


class _Move(torch.autograd.Function):
    """A redistribution, whose gradient is its adjoint, whose gradient is the redistribution."""

    @staticmethod
    def forward(x: Tensor, redistribution: Redistribution, flight: Flight | None) -> Tensor:
        return redistribution.run(x) if flight is None else redistribution.finish(flight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004 - torch's own
        ctx.redistribution = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        return _Move.apply(grad, ctx.redistribution.adjoint, None), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:  # pyright: ignore
        return _Move.apply(tangent, ctx.redistribution, None)

    vmap = unmapped("A switch of the sharded dim")


class _Gather(_Move):
    """A gather: each rank's gradient is a part of a mean, so that what is made of one has no derivative."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        return _Reduce.apply(grad, ctx.redistribution.adjoint, None), None, None


class _Reduce(_Move):
    backward = refused(
        "A gathered output has no second derivative, which the gradient of its gradient asks for."
    )


class _Request:
    """One call, checked: names that exist and a shape that the ranks' shards must have."""

    def __init__(self, x: Tensor, dims: Dims, mesh: Any, stage: str) -> None:
        self.x, self.dims, self.stage = x, dict(dims), stage
        self.names = list(self.dims)
        self.world = world_of(mesh, 60.0)
        self.rank, self.ranks = self.world.comm.rank, self.world.comm.size

    def error(self, message: str, hint: str = "") -> InputError:
        return InputError(f"{self.stage}: {message}", hint=hint)

    def position(self, name: str) -> int:
        if len(self.dims) != self.x.dim():
            raise self.error(
                f"x has shape {list(self.x.shape)}, dims names {len(self.dims)}: {', '.join(self.names)}.",
                hint="Name every dim of x, in order.",
            )
        if name not in self.dims:
            raise self.error(f"there is no dim {name!r}.", hint=f"The dims of x are {', '.join(self.names)}.")
        return self.names.index(name)

    def layout(self, name: str, size: int | None) -> Layout:
        if not isinstance(size, int) or size < 1:
            raise self.error(
                f"the size of the sharded dim {name!r} is {size!r}.",
                hint=f'Give the whole of it: dims={{…, "{name}": size, …}}.',
            )
        return Layout.even(size, self.ranks, dim=name)

    def check_shape(self, sharded: str | None) -> None:
        """Whether x may be a rank's part of a tensor of these dims."""
        for name, size, found in zip(self.names, self.dims.values(), self.x.shape, strict=True):
            wanted = self.layout(name, size).rows(self.rank) if name == sharded else size
            if wanted is not None and found != wanted:
                how = f"{wanted}, its part of {size}" if name == sharded else f"the whole {wanted}"
                raise self.error(
                    f"on rank {self.rank} of {self.ranks} x has {found} of {name}, not {how}.",
                    hint=f"x must be sharded by {sharded} alone." if sharded else "x must be whole.",
                )

    def redistribution(self, source: str, target: str | None) -> Redistribution:
        """What does it, made at the first call of its kind and agreed on by all ranks."""
        refuse_export(self.stage)
        known = _redistributions.setdefault(self.world, {})
        x = self.x
        key = (source, target, tuple(self.dims.items()), x.shape, x.dtype, x.device)
        if key in known:
            return known[key]
        try:
            schedule = self._schedule(source, target)
        except InputError as error:
            refuse(self.world.comm, error)
            raise
        facts = {
            "dims": " × ".join(
                f"{self.dims[n] if n == source else s} {n}" for n, s in zip(self.names, x.shape, strict=True)
            ),
            "dtype": str(x.dtype),
            "device": x.device.type,
            "plan": schedule.digest,
        }
        agree(self.world.comm, facts, what=f"switches at {self.stage}")
        self.world.comm.warm_up(x.device)
        while len(known) >= REDISTRIBUTIONS:
            known.pop(next(iter(known)))
        known[key] = Redistribution(schedule, self.world.comm, self.world.arena, name=str(facts))
        return known[key]

    def _schedule(self, source: str, target: str | None) -> Schedule:
        at = self.position(source), None if target is None else self.position(target)
        if source == target:
            raise self.error(f"x is sharded by {source} already.", hint="weft.keep checks that it is.")
        dtype = str(self.x.dtype).removeprefix("torch.")
        if dtype not in ITEM_BYTES:
            raise self.error(f"x is {self.x.dtype}.", hint=f"Use one of {', '.join(ITEM_BYTES)}.")
        self.check_shape(source)
        before = self.layout(source, self.dims[source])
        if target is None or at[1] is None:
            after = Layout.replicated(1, self.ranks, dim="whole")
        else:
            after = self.layout(target, self.x.shape[at[1]])
        shape = tuple(before.size if i == at[0] else size for i, size in enumerate(self.x.shape))
        return switch_schedule(Switch(before=before, after=after, shape=shape, dims=at, dtype=dtype))
