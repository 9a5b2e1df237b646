"""Estimate: what the closed forms of strategies are made of, to leave out what cannot win before it is built.

With what a formula over U × R alone leaves out: blocks that move for balance, slices with more heads than
others, copies in and out of messages, a fixed cost for every call and phase, machines that share a
network card, and cores that are shared by computing and sending.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.core.mesh import Mesh
from weft.core.problem import Problem
from weft.core.topology import Topology
from weft.plan.assignment import AssignmentCost
from weft.plan.balance import step_loads
from weft.plan.strategy import Strategy
from weft.simulate.costs import DENSE_BLOCK_ROWS, shared_seconds
from weft.simulate.predict import COPIES_PER_EXCHANGE

Floats = npt.NDArray[np.float64]


class LinkCost(NamedTuple):
    """Seconds before the first byte and for each byte, and the messages of a rank."""

    latency: float
    byte: float
    messages: int


def step_seconds(strategy: Strategy, problem: Problem, topology: Topology, cost: AssignmentCost) -> Floats:
    """[slice, rank of the ring, step]: the time of each rank's tiles, its kernel calls and rows included."""
    slices, ring = strategy.ulysses, strategy.ring
    rows = (
        topology.row_seconds
        * problem.batch
        * problem.heads
        / slices
        * problem.q.size
        / ring
        / DENSE_BLOCK_ROWS
    )
    return step_loads(cost.seconds + (topology.call_seconds + rows) * (cost.seconds > 0))


def scattered(  # noqa: PLR0913 - the terms of one sum
    strategy: Strategy,
    problem: Problem,
    topology: Topology,
    cost: AssignmentCost,
    *,
    steps: Floats,
    between: float,
    sending: float,
) -> float:
    """Return the seconds of scatter, `between` and return; messages take `sending` of those between."""
    slices, mesh, widest = strategy.ulysses, strategy.mesh_on(topology), cost.assignment.widest
    (q, kv), moved = sizes(problem), moves(problem, cost)
    swap, copy = (slices - 1) / slices, copy_seconds(topology) * widest
    wide, long = (spread(topology, mesh, axis, widest) for axis in ("ulysses", "ring"))
    scatter = phase(topology, (wide, (q + kv) * swap), (long, sum(moved))) + copy * (q + kv) * (slices > 1)
    back = phase(topology, (wide, q * swap), (long, moved[0])) + copy * q * (slices > 1)
    total = steps.sum(axis=2).ravel().tolist()
    shared = shared_seconds(topology, total, [scatter + back + sending] * problem.ranks)
    return float(max(scatter + between + back, shared))


def sizes(problem: Problem) -> tuple[float, float]:
    """Bytes of a rank's queries, and of its keys and values."""
    token = problem.batch * problem.head_dim * problem.item_bytes / problem.ranks
    return token * problem.heads * problem.q.size, 2 * token * problem.kv_heads * problem.kv.size


def moves(problem: Problem, cost: AssignmentCost) -> tuple[float, float]:
    """Bytes of a rank's rows and columns that leave home for balance."""
    q, kv = sizes(problem)
    return q * cost.moved[0], kv * cost.moved[1]


def phase(topology: Topology, *flows: tuple[LinkCost, float]) -> float:
    """Messages that start together: one latency, a copy into each, and what each costs to post."""
    real = [(link, size) for link, size in flows if size and link.messages]
    copy = copy_seconds(topology)
    posts = 2 * topology.post_seconds * sum(link.messages for link, _ in real)
    latency = max((link.latency for link, _ in real), default=0.0)
    return latency + posts + sum(size * (link.byte + copy) for link, size in real)


def launch_seconds(
    topology: Topology, *, attends: int, posts: int, messages: int, collectives: int = 0
) -> float:
    """Of a host, that packs before an exchange and unpacks after it."""
    copies = COPIES_PER_EXCHANGE * (posts + collectives)
    return topology.host.seconds(
        attends=attends, copies=copies, collectives=collectives, posts=posts, messages=messages
    )


def copy_seconds(topology: Topology) -> float:
    """Of a byte: it is read and written."""
    return 2 / topology.memory_bandwidth if topology.memory_bandwidth else 0.0


def spread(topology: Topology, mesh: Mesh, axis: str, widest: float) -> LinkCost:
    """From a rank to all others of its group at once; links inside and between machines work side by side.

    A rank with more to send than others has its link to itself; the card of a machine knows the mean only.
    """
    worst = LinkCost(0.0, 0.0, 0)
    for first, *others in mesh.groups(axis):
        links = [(topology.machine(first) != topology.machine(to), topology.link(first, to)) for to in others]
        if not links:
            return worst
        card = topology.devices / topology.nic_bandwidth if topology.nic_bandwidth else 0.0
        near = sum(widest / link.bandwidth for far, link in links if not far)
        away = sum(max(widest / link.bandwidth, card) for far, link in links if far)
        latency = max(link.latency for _, link in links)
        worst = max(
            worst, LinkCost(latency, max(near, away) / len(links), len(links)), key=lambda cost: cost.byte
        )
    return worst


def neighbour(topology: Topology, mesh: Mesh, widest: float) -> LinkCost:
    """From every rank to the next of its ring, at worst; those that leave a machine share its card."""
    pairs = [
        pair for group in mesh.groups("ring") for pair in zip(group, [*group[1:], group[0]], strict=True)
    ]
    leaving = Counter(topology.machine(a) for a, b in pairs if topology.machine(a) != topology.machine(b))
    worst = LinkCost(0.0, 0.0, 1)
    for a, b in pairs:
        link, card = topology.link(a, b), 0.0
        if topology.machine(a) != topology.machine(b) and topology.nic_bandwidth:
            card = leaving[topology.machine(a)] / topology.nic_bandwidth
        worst = LinkCost(max(worst.latency, link.latency), max(worst.byte, widest / link.bandwidth, card), 1)
    return worst
