"""Switch, split, gather and reduce tensors that are sharded by a named dim.

    GRID = {"batch": None, "time": 17, "space": 1024, "channel": None}   # all dims in order, whole sizes
    x = weft.split(x, "time", dims=GRID)             whole → this rank's shard of time         no bytes
    x = weft.switch(x, "time", "space", dims=GRID)   time → space                  M/N · (N-1)/N a rank
    x = weft.gather(x, "space", dims=GRID)           space → whole                 M/N · (N-1)   a rank

Shards are as even as can be; some are empty where a dim is shorter than there are ranks.

Gradients: the world's loss is the sum of the ranks' losses, and each backward is the exact adjoint. That of a
switch is the switch back; of a gather, a reduce-scatter; of a split, the shard's gradient among zeros. So the
gradient of a whole tensor, as of a replicated parameter, is partial on each rank, and the sum over the ranks
is the gradient. If every rank computes the same loss from a gathered output, that loss counts N times: take
the mean over the ranks instead, as DDP does.
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
from weft.run.agree import abort, agree
from weft.run.measure import trace
from weft.run.switch_runner import Flight, SwitchRunner
from weft.run.transforms import is_transformed, refuse_export, refused, unmapped
from weft.run.world import World, world_of
from weft.schedule.switch import switch as switch_schedule

Dims = Mapping[str, int | None]
"""All dims of a tensor in order, with global sizes; None for sizes that are not checked."""

MAX_RUNNERS = 1024
"""Cached by each world; the oldest are evicted."""
_runners: WeakKeyDictionary[World, dict[Any, SwitchRunner]] = WeakKeyDictionary()


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
    """Redistribute x from shards of `source` to shards of `target`.

    mesh       a process group, a DeviceMesh or one axis of it; all ranks by default. On a mesh of two
               axes x may be sharded by two dims; the one that stays is None in `dims`.
    stage      a name of the place in the model, for errors.
    async_op   return a `Pending` at once; its `wait()` returns the tensor, and x must not be written before.

    >>> x = torch.zeros(2, 5, 7)  # on one rank, which has all of them
    >>> switch(x, "time", "space", dims={"batch": None, "time": 5, "space": 7}).shape
    torch.Size([2, 5, 7])
    """
    request = _Request(x, dims, mesh, stage or f"switch {source} → {target}")
    redistribution = request.redistribution(source, target)
    if not async_op:
        return _move(x, redistribution)
    # Under a trace or a transform all of it runs in `wait`.
    waits = trace.active is not None or is_transformed()
    return Pending(x, redistribution, None if waits else redistribution.start(x.detach()))


def gather(x: Tensor, source: str, *, dims: Dims, mesh: Any = None, stage: str = "") -> Tensor:
    """Return the whole tensor, on every rank, of which each has its shard of `source`.

    >>> x = torch.zeros(2, 5, 7)  # on one rank, which has all of them
    >>> gather(x, "time", dims={"batch": None, "time": 5, "space": 7}).shape
    torch.Size([2, 5, 7])
    """
    request = _Request(x, dims, mesh, stage or f"gather {source}")
    return _move(x, request.redistribution(source, None), function=_Gather)


def all_gather(x: Tensor, *, mesh: Any = None, stage: str = "") -> Tensor:
    """Return the equally large tensors of all ranks, [ranks, …], on each of them."""
    ranks = world_of(mesh, 60.0).comm.size
    dims = {"rank": ranks} | {f"dim {at}": size for at, size in enumerate(x.shape)}
    return gather(x[None].contiguous(), "rank", dims=dims, mesh=mesh, stage=stage)


def reduce(x: Tensor, target: str, *, dims: Dims, mesh: Any = None, stage: str = "") -> Tensor:
    """Return this rank's shard of `target` of the sum of all ranks' tensors: the adjoint of a gather."""
    shard = split(x, target, dims=dims, mesh=mesh, stage=stage)
    redistribution = _Request(shard, dims, mesh, stage or f"reduce {target}").redistribution(target, None)
    return _move(x, redistribution.adjoint)


def split(x: Tensor, target: str, *, dims: Dims, mesh: Any = None, stage: str = "") -> Tensor:
    """Return this rank's shard of `target` of a tensor that every rank has whole; nothing is sent.

    >>> x = torch.zeros(2, 5, 7)  # on one rank, which gets all of them
    >>> split(x, "time", dims={"batch": None, "time": 5, "space": 7}).shape
    torch.Size([2, 5, 7])
    """
    request = _Request(x, dims, mesh, stage or f"split {target}")
    at = request.position(target)
    request.check_shape(None)
    ((start, stop),) = request.layout(target, x.shape[at]).shards[request.rank] or ((0, 0),)
    return x.narrow(at, start, stop - start).contiguous()


def assert_sharded(x: Tensor, source: str, *, dims: Dims, mesh: Any = None, stage: str = "") -> Tensor:
    """Return x; raise if its shape is not that of this rank's shard of `source`.

    >>> x = torch.zeros(2, 5, 7)  # on one rank, which has all of them
    >>> assert_sharded(x, "time", dims={"batch": None, "time": 5, "space": 7}).shape
    torch.Size([2, 5, 7])
    """
    request = _Request(x, dims, mesh, stage or f"assert_sharded {source}")
    request.position(source)
    request.check_shape(source)
    return x


class Pending:
    """A switch under way; `wait` returns its result."""

    def __init__(self, x: Tensor, redistribution: SwitchRunner, flight: Flight | None) -> None:
        self._x, self._runner, self._flight = x, redistribution, flight
        self._result: Tensor | None = None

    def wait(self) -> Tensor:
        if self._result is None:
            self._result = _move(self._x, self._runner, self._flight)
            del self._x, self._flight
        return self._result


class _Move(torch.autograd.Function):
    """A redistribution, whose gradient is its adjoint, and the reverse."""

    @staticmethod
    def forward(x: Tensor, redistribution: SwitchRunner, flight: Flight | None) -> Tensor:
        return redistribution.run(x) if flight is None else redistribution.finish(flight)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG004 - torch's own
        ctx.redistribution = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        return _move(grad, ctx.redistribution.adjoint), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Any:  # pyright: ignore
        return _move(tangent, ctx.redistribution)

    vmap = unmapped("A switch of the sharded dim")


class _Gather(_Move):
    """A gather; its gradient has none, since the gradient of each rank is a share of a mean."""

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # pyright: ignore
        return _move(grad, ctx.redistribution.adjoint, function=_Reduce), None, None


class _Reduce(_Move):
    backward = refused(
        "A gathered output has no second derivative, which the gradient of its gradient needs."
    )


def _move(
    x: Tensor, runner: SwitchRunner, flight: Flight | None = None, *, function: type[_Move] = _Move
) -> Tensor:
    return function.apply(x, runner, flight)  # pyright: ignore


class _Request:
    """One call: its runner, and checks of the dims and of the shape of x."""

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
        """Raise if x cannot be this rank's shard of a tensor of these dims."""
        for name, size, actual in zip(self.names, self.dims.values(), self.x.shape, strict=True):
            wanted = self.layout(name, size).rows(self.rank) if name == sharded else size
            if wanted is not None and actual != wanted:
                expected = f"{wanted}, its part of {size}" if name == sharded else f"the whole {wanted}"
                raise self.error(
                    f"on rank {self.rank} of {self.ranks} x has {actual} of {name}, not {expected}.",
                    hint=f"x must be sharded by {sharded} alone." if sharded else "x must be whole.",
                )

    def redistribution(self, source: str, target: str | None) -> SwitchRunner:
        """Return the cached runner, or make one that all ranks agree on."""
        refuse_export(self.stage)
        known = _runners.setdefault(self.world, {})
        x = self.x
        key = (source, target, tuple(self.dims.items()), x.shape, x.dtype, x.device)
        if key in known:
            return known[key]
        try:
            schedule = self._schedule(source, target)
        except InputError as error:
            abort(self.world.comm, error)
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
        while len(known) >= MAX_RUNNERS:
            known.pop(next(iter(known)))
        known[key] = SwitchRunner(schedule, self.world.comm, self.world.arena, name=str(facts))
        return known[key]

    def _schedule(self, source: str, target: str | None) -> Schedule:
        at = self.position(source), None if target is None else self.position(target)
        if source == target:
            raise self.error(
                f"x is sharded by {source} already.", hint="weft.assert_sharded checks that it is."
            )
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
