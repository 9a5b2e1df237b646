"""Sharing: tasks of a simulation, the network routes of messages, and the resources that tasks share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.core.topology import Topology
from weft.program.steps import Step


class SharedResource:
    """A bandwidth that tasks share equally."""

    __slots__ = ("capacity", "room", "tasks", "top")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.tasks: dict[SimulatedTask, None] = {}
        self.top = self.room = 0.0
        """The highest rate of any of its tasks alone, and how many tasks of that rate fit."""


class NetworkRoute(NamedTuple):
    """The latency of a message, its rate alone, and the resources that it shares."""

    latency: float
    rate: float
    pools: tuple[SharedResource, ...]
    near: bool
    """Inside one machine."""


LOCAL = NetworkRoute(0.0, 1.0, (), near=True)
"""Of computation, whose amount is in seconds."""


@dataclass(eq=False, slots=True)
class SimulatedTask:
    """The amount left to do, its speed and since when it has that; `version` marks older events as stale.

    `step` is what a rank computes, or the Post of a message to rank `peer`.
    """

    rank: int
    step: Step
    left: float
    start: float
    route: NetworkRoute = LOCAL
    peer: int = -1
    num_bytes: int = 0
    since: float = 0.0
    speed: float = 0.0
    version: int = 0


class Network:
    """The routes of a topology, each made at its first use."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.routes: dict[tuple[int, int], NetworkRoute] = {}
        self.pools: dict[tuple[str, int], SharedResource] = {}

    def route(self, src: int, dst: int) -> NetworkRoute:
        """Make the route of a pair of ranks."""
        topology, link = self.topology, self.topology.link(src, dst)
        a, b = topology.machine(src), topology.machine(dst)
        rate = link.bandwidth
        shared: list[tuple[str, int, float]] = []
        if link is topology.intra and a == b:
            rate = min(rate, topology.pair_bandwidth or rate)
            shared = [("out", src, link.bandwidth), ("in", dst, link.bandwidth)]
        elif a != b:
            if link is topology.inter:
                shared = [("far out", src, rate), ("far in", dst, rate)]
            if nic := topology.nic_bandwidth:
                rate = min(rate, nic)
                shared += [("nic out", a, nic), ("nic in", b, nic)]
        pools = tuple(self._pool(kind, where, size, rate) for kind, where, size in shared)
        self.routes[src, dst] = NetworkRoute(link.latency, rate, pools, a == b)
        return self.routes[src, dst]

    def _pool(self, kind: str, where: int, capacity: float, rate: float) -> SharedResource:
        pool = self.pools.setdefault((kind, where), SharedResource(capacity))
        pool.top = max(pool.top, rate)
        pool.room = capacity / pool.top
        return pool
