"""World: the ranks this process runs with. The only reader of RANK and WORLD_SIZE."""

from __future__ import annotations

import logging
import os
from datetime import timedelta
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from weft.core.errors import CommError, InputError
from weft.core.mesh import Mesh
from weft.core.topology import Topology
from weft.plan.place import Planned
from weft.run.arena import Arena
from weft.run.comm import Comm, Message, shm, symmetric
from weft.run.comm.group import GroupComm, store_of
from weft.run.comm.onesided import OneSidedComm
from weft.run.comm.window import Window
from weft.run.groups import join_world
from weft.run.op import forget, register
from weft.run.planner import Planner

_log = logging.getLogger("weft.run")

TRANSPORTS = ("auto", "group", "shm", "symmetric")


class SoloComm:
    """One rank has nobody to talk to."""

    transport, rank, size, bytes_sent = "alone", 0, 1, 0

    def begin(self, device: torch.device) -> None:
        """No messages, no memory for them."""

    def post(self, sends: list[Message], receives: list[Message], label: str, tag: int) -> Any:
        raise CommError(f"{label}: a world of one rank has nobody to send to.")

    def warm_up(self, device: torch.device) -> None:
        """Nothing has to be connected."""

    def collective(self, device: torch.device) -> bool:
        del device
        return False

    def all_to_all(self, sends: list[Message], receives: list[Message], label: str) -> Any:
        return self.post(sends, receives, label, 0)

    def gather_numbers(self, numbers: list[int]) -> list[list[int]]:
        return [numbers]


class World:
    """A communicator with what was compiled for it; one for each process group and time-out."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.arena = Arena()
        self.compiled: dict[Any, Any] = {}
        """Executors by the calls that they were made for, the least recently used first."""

    @cached_property
    def planner(self) -> Planner:
        """Who plans the attentions of this world whose masks change."""
        group = getattr(self.comm, "group", None)
        # A connection of its own: the planner's thread uses it beside others.
        store = partial(_planner_store, group) if group is not None else None
        return Planner(self.comm, store, self.prepare, self.change)

    def prepare(self, old: Planned, new: Planned) -> None:
        """Make the executors of a plan that will take the place of another, on the planner's thread."""
        for key, executor in list(self.compiled.items()) if new.strategy == old.strategy else ():
            if key[0].plan is old:
                new.executors[_for_plan(key, "")] = executor.renewed(new.schedule)

    def change(self, old: Planned, new: Planned | None) -> None:
        """Let go of the executors of a plan that will not come again; all ranks do it at the same time.

        The calls that they were made for were agreed on, and so was the new plan: they go on by it at once.
        Those of another strategy are made as for any other call, and tuned.
        """
        for key in [key for key in self.compiled if key[0].plan is old]:
            executor = self.compiled.pop(key)
            forget(executor)
            if new is not None and new.strategy == old.strategy:
                other = new.executors.pop(_for_plan(key, ""), None) or executor.renewed(new.schedule)
                register(other)
                self.compiled[_for_plan(key, new)] = other

    def close(self) -> None:
        """Give the memory back that it shares with other ranks, which must not need it any more."""
        if "planner" in vars(self):
            self.planner.close()
        self.compiled.clear()
        self.arena.clear()
        if isinstance(self.comm, OneSidedComm):
            self.comm.close()


def _for_plan(key: Any, plan: Any) -> Any:
    call, *rest = key
    return call._replace(plan=plan), *rest


STORE_TIMEOUT = timedelta(seconds=10)
"""That a planner's thread may wait for a key: what it asks for is there, unless its rank 0 is gone."""


def _planner_store(group: dist.ProcessGroup, channel: int) -> Any:
    store = dist.PrefixStore(f"weft planner {channel}", store_of(group).clone())  # pyright: ignore
    store.set_timeout(STORE_TIMEOUT)
    return store


_alone = World(SoloComm())
_worlds: WeakKeyDictionary[dist.ProcessGroup, dict[float, World]] = WeakKeyDictionary()


def world_of(mesh: Any, timeout: float) -> World:
    """The world of a process group, a DeviceMesh, or by default of all processes; a World is itself."""
    if isinstance(mesh, World):
        return mesh
    group = _group_of(mesh)
    if group is None:
        return _alone
    known = _worlds.setdefault(group, {})
    if timeout not in known:
        _close_ended()
        known[timeout] = World(_comm(group, timeout))
    return known[timeout]


def _close_ended() -> None:
    """Give back the memory of worlds whose groups were destroyed; a new group may have the same name."""
    for group in [group for group in _worlds if group not in dist.distributed_c10d._world.pg_map]:
        for world in _worlds.pop(group).values():
            world.close()


def transport() -> str:
    """What $WEFT_TRANSPORT asks for: shared memory where it is (auto), for all ranks (shm), never (group).

    symmetric is the memory of GPUs, not yet run on any; auto takes it where calibration found it faster.
    """
    asked = os.environ.get("WEFT_TRANSPORT", "auto")
    if asked not in TRANSPORTS:
        raise InputError(f"WEFT_TRANSPORT={asked!r} is none of {', '.join(TRANSPORTS)}.")
    return asked


def _comm(group: dist.ProcessGroup, timeout: float) -> Comm:
    base, asked = GroupComm(group, timeout), transport()
    if asked == "group" or base.size == 1:
        return base
    if asked == "symmetric":
        return symmetric_comm(group, timeout, strict=True)
    if asked == "auto" and measured_transport() == "symmetric":
        return symmetric_comm(group, timeout, strict=False)
    return OneSidedComm(base, shm.meet, timeout, group=group, strict=asked != "auto")


def measured_transport() -> str:
    """What the topology of $WEFT_TOPOLOGY says is faster on GPUs; empty if it says nothing."""
    path = os.environ.get("WEFT_TOPOLOGY")
    return Topology.from_toml(path).transport if path else ""


def symmetric_comm(group: dist.ProcessGroup, timeout: float, *, strict: bool) -> OneSidedComm:
    """Messages through the symmetric memory of GPUs; unless `strict`, as by default where ranks have none."""

    def meet(base: Comm) -> tuple[Window | None, str]:
        window, reason = symmetric.meet(group, base)
        if window is not None or strict:
            return window, reason
        _log.warning("No symmetric memory, which %s asks for: %s.", "WEFT_TOPOLOGY", reason)
        return shm.meet(base)

    base = GroupComm(group, timeout)
    return OneSidedComm(base, meet, timeout, group=group, strict=strict, transport="symmetric")


def _group_of(mesh: Any) -> dist.ProcessGroup | None:
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim > 1 and not mesh.mesh_dim_names:
            raise InputError(
                f"A DeviceMesh of {' × '.join(map(str, mesh.shape))} ranks has no names for its dims.",
                hint="Give init_device_mesh mesh_dim_names, such as ('ring', 'ulysses').",
            )
        return (mesh if mesh.ndim == 1 else mesh._flatten()).get_group()
    if isinstance(mesh, dist.ProcessGroup):
        return mesh
    if mesh is not None and not isinstance(mesh, Mesh):
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
    """Whether torchrun, or something that sets what it sets, started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def place() -> tuple[int, int]:
    """This process's rank and how many there are, before they meet if need be."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def init_world(store: Any) -> None:
    """Join the world of the ranks that share `store`, a new one for each generation of ranks.

    An old store still has the addresses of ranks that may be gone.
    """
    rank, world = place()
    join_world(store=store, rank=rank, world_size=world)


def machines() -> int:
    """How many machines the world spans, as the launcher tells."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return max(1, world // int(os.environ.get("LOCAL_WORLD_SIZE", world)))


def _join() -> bool:
    """Under torchrun, join the world that the environment describes; else we are alone."""
    if not is_launched():
        return False
    join_world()
    return True


def axes_of(mesh: Any) -> str | None:
    """The strategy that a mesh with named axes asks for, if it names any."""
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
