"""Sharing: tasks that take time, and what they have to share with each other."""

from __future__ import annotations

from typing import NamedTuple

from weft.core.topology import Topology
from weft.program.steps import Step


class Pool:
    """Something that tasks share equally."""

    __slots__ = ("capacity", "room", "tasks", "top")

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.tasks: dict[Task, None] = {}
        self.top = self.room = 0.0
        """The fastest that any of its tasks could be alone, and how many such have all that they can use."""


class Route(NamedTuple):
    """How long a message takes to begin, how fast it could be alone, and what it shares."""

    latency: float
    rate: float
    pools: tuple[Pool, ...]
    near: bool
    """Inside one machine."""


HERE = Route(0.0, 1.0, (), near=True)
"""Of what moves nowhere: a second a second."""


class Task:
    """What is left to do, at which speed, since when. A version tells stale events from the real one.

    `step` is what a rank computes, or the Post of a message to rank `peer`.
    """

    __slots__ = (
        "left", "num_bytes", "peer", "rank", "route", "since", "speed", "start", "step", "version",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - made a million times
        self,
        rank: int,
        step: Step,
        left: float,
        start: float,
        route: Route = HERE,
        peer: int = -1,
        num_bytes: int = 0,
    ) -> None:
        self.rank, self.step, self.left, self.route, self.peer = rank, step, left, route, peer
        self.start, self.since, self.speed, self.version = start, start, 0.0, 0
        self.num_bytes = num_bytes


class Network:
    """The routes of a topology, each made when it is first asked for."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.routes: dict[tuple[int, int], Route] = {}
        self.pools: dict[tuple[str, int], Pool] = {}

    def route(self, src: int, dst: int) -> Route:
        if found := self.routes.get((src, dst)):
            return found
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
        self.routes[src, dst] = Route(link.latency, rate, pools, a == b)
        return self.routes[src, dst]

    def _pool(self, kind: str, where: int, capacity: float, rate: float) -> Pool:
        pool = self.pools.setdefault((kind, where), Pool(capacity))
        pool.top = max(pool.top, rate)
        pool.room = capacity / pool.top
        return pool
