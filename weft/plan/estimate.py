"""Estimate: a closed form for the time of a recipe, to leave out what cannot win before it is built.

    scatter + Σ over ring steps of max(compute of the slowest rank, one hop) + return

and for a torus two clocks, of the wire and of the slowest rank, through its stages. Both are
with what a formula over U × R alone leaves out: blocks that move for balance, slices with more heads than
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
from weft.plan.balance import step_loads
from weft.plan.recipe import Recipe, most_machines
from weft.simulate.costs import ROW, shared_seconds


class Way(NamedTuple):
    """Seconds before the first byte and for each byte, and the messages of a rank."""

    latency: float
    byte: float
    messages: int


def estimate(
    problem: Problem,
    topology: Topology,
    recipe: Recipe,
    seconds: npt.NDArray[np.float64],
    *,
    moved: tuple[float, float] = (0.0, 0.0),
    needed: float = 1.0,
    widest: float = 1.0,
) -> float:
    """`seconds[u, a, b]` is the compute of slice u between row group a and column group b.

    `moved` is the share of row and column blocks that leave home; `needed` the share of the other
    ranks' keys that a rank's tiles touch (a ring carries them all, a gather only those); `widest`
    the heads of the slice that has most, over the mean.
    """
    ranks, slices, ring, mesh = problem.ranks, recipe.ulysses, recipe.ring, recipe.mesh_on(topology)
    token = problem.batch * problem.head_dim * problem.item_bytes / ranks
    q = token * problem.heads * problem.q.size
    kv = 2 * token * problem.kv_heads * problem.kv.size
    swap = (slices - 1) / slices
    copy = copy_seconds(topology) * widest
    moves = (q * moved[0], kv * moved[1])
    if recipe.exchange == "torus":
        compute = seconds.sum(axis=2)
        staged, sent = _torus(topology, recipe, (q, kv), float(compute.max()), widest)
        moving = _phase(topology, (spread(topology, mesh, "ring", widest), sum(moves) + moves[0]))
        shared = shared_seconds(topology, compute.ravel().tolist(), [sent] * ranks)
        return float(max(staged + moving, shared))
    wide, long = (spread(topology, mesh, axis, widest) for axis in ("ulysses", "ring"))
    scatter = _phase(topology, (wide, (q + kv) * swap), (long, sum(moves))) + copy * (q + kv) * (slices > 1)
    back = _phase(topology, (wide, q * swap), (long, moves[0])) + copy * q * (slices > 1)
    rows = topology.row_seconds * problem.batch * problem.heads / slices * problem.q.size / ring / ROW
    by_step = step_loads(seconds + (topology.call_seconds + rows) * (seconds > 0))
    if recipe.exchange == "gather":
        fetched = kv * (ring - 1) * needed
        sent = _phase(topology, (long, fetched))
        near, far = by_step[:, :, 0].max(), by_step[:, :, 1:].sum(axis=2).max(initial=0.0)
        middle = max(near, sent) + far + copy * fetched
    else:
        hop = _phase(topology, (neighbour(topology, mesh, widest), kv)) if ring > 1 else 0.0
        slow = by_step.max(axis=(0, 1))
        middle, sent = sum(max(step, hop) for step in slow[:-1]) + slow[-1], hop * (ring - 1)
    total = by_step.sum(axis=2).ravel().tolist()
    shared = shared_seconds(topology, total, [scatter + back + sent] * ranks)
    return float(max(scatter + middle + back, shared))


def _torus(
    topology: Topology, recipe: Recipe, sizes: tuple[float, float], compute: float, widest: float
) -> tuple[float, float]:
    """Seconds in all, and of sending; `compute` is that of the slowest rank, `sizes` a rank's q and kv."""
    machines, parts, (q, kv) = topology.machines, recipe.chunks, sizes
    torus = most_machines(recipe.ulysses, machines, topology.devices)
    inside = recipe.ulysses // torus
    hops, stages = topology.devices // inside, (machines - 1) * parts
    late = 0 if torus == 1 else stages if recipe.defer is None else min(recipe.defer, stages)
    byte, latency = widest / topology.intra.bandwidth, topology.intra.latency
    near, around = Way(latency, byte, inside - 1), Way(latency, byte, hops - 1)
    share = (inside - 1) / inside
    # Neighbours on the Ulysses axis are on one machine: where one has more heads, its card has more to do.
    card = topology.devices / topology.nic_bandwidth if topology.nic_bandwidth else 0.0
    away = Way(0.0, widest * max(1 / topology.inter.bandwidth, card), 1)
    pull_q, pull_kv = (_phase(topology, (away, size / torus / parts)) for size in (q, kv))
    passing = _phase(topology, (around, kv / torus / parts * (hops - 1)))
    unit, call = compute / (torus * machines), topology.call_seconds * hops
    wire = sent = _phase(topology, (near, q * share))
    clock = _phase(topology, (near, (q + kv) * share)) + max(unit + call, passing * parts)
    rows = (torus - 1) * parts
    posted = [0.0] * parts  # a pull is posted so many stages before it is used
    for _ in range(rows):
        wire = max(wire, posted[-parts]) + pull_q
        posted.append(clock)
        clock = max(clock, wire + topology.inter.latency) + unit / parts + call
    for stage in range(1, stages + 1):
        wire = max(wire, posted[-parts]) + pull_kv
        posted.append(clock)
        own = (stage <= stages - late) * (unit / parts + call)
        clock = max(clock, wire + topology.inter.latency)
        if stage < stages:
            clock += max(passing, (torus - 1) * unit / parts + own + call * (not own))
            continue
        for _ in range(rows):
            clock += unit / parts**2 + call
            wire = max(wire, clock) + pull_q
        clock += own
    clock += late * (unit / parts + call)
    back = _phase(topology, (near, q * share / torus))
    sent += 2 * rows * pull_q + stages * (pull_kv + passing) + back
    return max(clock, wire + topology.inter.latency) + back, sent


def _phase(topology: Topology, *flows: tuple[Way, float]) -> float:
    """Messages that start together: one latency, a copy into each, and what each costs to post."""
    real = [(way, size) for way, size in flows if size and way.messages]
    copy = copy_seconds(topology)
    posts = 2 * topology.post_seconds * sum(way.messages for way, _ in real)
    latency = max((way.latency for way, _ in real), default=0.0)
    return latency + posts + sum(size * (way.byte + copy) for way, size in real)


def copy_seconds(topology: Topology) -> float:
    """Of a byte: it is read and written."""
    return 2 / topology.memory_bandwidth if topology.memory_bandwidth else 0.0


def spread(topology: Topology, mesh: Mesh, axis: str, widest: float) -> Way:
    """From a rank to all others of its group at once; links inside and between machines work side by side.

    A rank with more to send than others has its link to itself; the card of a machine knows the mean only.
    """
    worst = Way(0.0, 0.0, 0)
    for first, *others in mesh.groups(axis):
        links = [(topology.machine(first) != topology.machine(to), topology.link(first, to)) for to in others]
        if not links:
            return worst
        card = topology.devices / topology.nic_bandwidth if topology.nic_bandwidth else 0.0
        near = sum(widest / link.bandwidth for far, link in links if not far)
        away = sum(max(widest / link.bandwidth, card) for far, link in links if far)
        latency = max(link.latency for _, link in links)
        worst = max(worst, Way(latency, max(near, away) / len(links), len(links)), key=lambda way: way.byte)
    return worst


def neighbour(topology: Topology, mesh: Mesh, widest: float) -> Way:
    """From every rank to the next of its ring, at worst; those that leave a machine share its card."""
    pairs = [
        pair for group in mesh.groups("ring") for pair in zip(group, [*group[1:], group[0]], strict=True)
    ]
    leaving = Counter(topology.machine(a) for a, b in pairs if topology.machine(a) != topology.machine(b))
    worst = Way(0.0, 0.0, 1)
    for a, b in pairs:
        link, card = topology.link(a, b), 0.0
        if topology.machine(a) != topology.machine(b) and topology.nic_bandwidth:
            card = leaving[topology.machine(a)] / topology.nic_bandwidth
        worst = Way(max(worst.latency, link.latency), max(worst.byte, widest / link.bandwidth, card), 1)
    return worst
