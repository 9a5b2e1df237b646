"""World: the ranks this process runs with. The only reader of RANK and WORLD_SIZE."""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.core.errors import CommError, InputError
from weft.core.mesh import Mesh
from weft.run.arena import Arena

if TYPE_CHECKING:
    from weft.plan.place import Planned
    from weft.run.call import AttentionCall, Counts
    from weft.run.comm import Comm, Message, PendingExchange
    from weft.run.execute import Executor
    from weft.run.planner import Planner

    CallKey = tuple[AttentionCall, str | None, Counts | None]
    """A call, the strategy that its mesh names, and the rows of all ranks if the call does not give them."""


class LocalComm:
    """The communicator of one rank: there is no other to send to, to agree with or to wait for."""

    transport, rank, size, bytes_sent = "local", 0, 1, 0

    def begin(self, device: torch.device) -> None:
        """Messages need no memory: there are none."""

    def post(self, sends: list[Message], receives: list[Message], label: str, tag: int) -> PendingExchange:
        del sends, receives, tag
        raise CommError(f"{label}: a world of one rank has no other rank to send to.")

    def warm_up(self, device: torch.device) -> None:
        """Nothing has to be connected."""

    def collective(self, device: torch.device) -> bool:
        del device
        return False

    def all_to_all(self, sends: list[Message], receives: list[Message], label: str) -> PendingExchange:
        return self.post(sends, receives, label, 0)

    def all_gather_ints(self, numbers: list[int]) -> list[list[int]]:
        return [numbers]


class World:
    """A communicator with what was compiled for it; one for each process group and time-out."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.arena = Arena()
        self.executors: dict[CallKey, Executor] = {}
        """By the calls that they were made for, the least recently used first."""

    @cached_property
    def planner(self) -> Planner:
        """Plans the attentions of this world whose masks change."""
        from weft.run.planner import Planner

        group: dist.ProcessGroup | None = getattr(self.comm, "group", None)
        # A connection of its own: the planner's thread uses it beside others.
        store = partial(_planner_store, group) if group is not None else None
        return Planner(self.comm, store, self.prepare, self.change)

    def prepare(self, old: Planned, new: Planned) -> None:
        """Make the executors of a plan that will take the place of another, on the planner's thread."""
        for key, executor in list(self.executors.items()) if new.strategy == old.strategy else ():
            if key[0].plan is old:
                new.executors[_for_plan(key, "")] = executor.renewed(new.schedule)

    def change(self, old: Planned, new: Planned | None) -> None:
        """Evict the executors of a plan that will not come again; all ranks do it at the same time.

        The calls that they were made for were agreed on, and so was the new plan: they go on by it at once.
        Those of another strategy are made as for any other call, and tuned.
        """
        for key in [key for key in self.executors if key[0].plan is old]:
            executor = self.executors.pop(key)
            if new is not None and new.strategy == old.strategy:
                renewed = new.executors.pop(_for_plan(key, ""), None) or executor.renewed(new.schedule)
                self.executors[_for_plan(key, new)] = renewed

    def close(self) -> None:
        """Give the memory back that it shares with other ranks, which must not need it any more."""
        if "planner" in vars(self):
            self.planner.close()
        self.executors.clear()
        self.arena.clear()
        close = getattr(self.comm, "close", None)  # only shared memory has to be closed
        if close is not None:
            close()


def _for_plan(key: CallKey, plan: str | Planned) -> CallKey:
    call, axes, counts = key
    return call._replace(plan=plan), axes, counts


STORE_TIMEOUT = timedelta(seconds=10)
"""Longest wait of a planner's thread for a key: it was set before, unless rank 0 is gone."""


def _planner_store(group: dist.ProcessGroup, channel: int) -> Any:
    from weft.run.comm.group import store_of

    store = dist.PrefixStore(f"weft planner {channel}", store_of(group).clone())  # pyright: ignore
    store.set_timeout(STORE_TIMEOUT)
    return store


MeshLike = Mesh | DeviceMesh | dist.ProcessGroup | World | None
"""The ranks of a call; None: all of them."""

_local = World(LocalComm())
_worlds: WeakKeyDictionary[dist.ProcessGroup, dict[float, World]] = WeakKeyDictionary()


def world_of(mesh: MeshLike, timeout: float) -> World:
    """Return the world of a process group or a DeviceMesh; by default of all processes. A World is itself."""
    if isinstance(mesh, World):
        return mesh
    group = _group_of(mesh)
    if group is None:
        return _local
    known = _worlds.setdefault(group, {})
    if timeout not in known:
        from weft.run.transport import connect

        _close_ended()
        known[timeout] = World(connect(group, timeout))
    return known[timeout]


def _close_ended() -> None:
    """Give back the memory of worlds whose groups were destroyed; a new group may have the same name."""
    for group in [group for group in _worlds if group not in dist.distributed_c10d._world.pg_map]:  # pyright: ignore[reportPrivateUsage]
        for world in _worlds.pop(group).values():
            world.close()


def _group_of(mesh: Mesh | DeviceMesh | dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim > 1 and not mesh.mesh_dim_names:
            raise InputError(
                f"A DeviceMesh of {' × '.join(map(str, mesh.shape))} ranks has no names for its dims.",
                hint="Give init_device_mesh mesh_dim_names, such as ('ring', 'ulysses').",
            )
        return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()  # pyright: ignore[reportPrivateUsage]
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if mesh is not None and not isinstance(mesh, Mesh):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise InputError(
            f"mesh={mesh!r} is a {type(mesh).__name__}.",
            hint="Give a weft.Mesh, a torch DeviceMesh, a process group, or nothing for all ranks.",
        )
    group = dist.group.WORLD if dist.is_initialized() or _join() else None
    ranks = 1 if group is None else group.size()
    if mesh is not None and mesh.ranks != ranks:
        raise InputError(
            f"The mesh {mesh} has {mesh.ranks} ranks, this world has {ranks}.",
            hint=f"Use axes whose product is {ranks}, or start {mesh.ranks} ranks.",
        )
    return group


def is_launched() -> bool:
    """Whether a launcher such as torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def place() -> tuple[int, int]:
    """Return this process's rank and the number of ranks, which may not have joined a world yet."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def machines() -> int:
    """Return the number of machines that the world spans, by the launcher's environment."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, world // int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def _join() -> bool:
    """Join the world that the environment describes, if it does: torchrun's."""
    if not is_launched():
        return False
    from weft.run.groups import join_world

    join_world()
    return True


def axes_of(mesh: MeshLike) -> str | None:
    """Return the strategy that the axes of a mesh name, if they are named ring and ulysses."""
    if isinstance(mesh, DeviceMesh):
        names = mesh.mesh_dim_names or ()
        sizes: dict[str, int] = dict(zip(names, tuple(mesh.mesh.shape), strict=False))
    elif isinstance(mesh, Mesh):
        sizes = dict(mesh.axes)
    else:
        return None
    if not sizes or not set(sizes) <= {"ring", "ulysses"}:
        return None
    if list(sizes) == ["ulysses", "ring"] and min(sizes.values()) > 1:
        raise InputError(
            "The mesh has ulysses outside ring.",
            hint="Order the axes ring, ulysses: heads on the faster links.",
        )
    return f"usp:{sizes.get('ulysses', 1)}x{sizes.get('ring', 1)}"
