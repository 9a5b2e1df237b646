"""Estimate: a closed form for the time of a recipe, to leave out what cannot win before it is built.

    scatter + Σ over ring steps of max(compute of the slowest rank, one hop) + return

with what a formula over U × R alone leaves out: blocks that move for balance, a fixed cost for every
call and message, and cores that are shared by computing and sending.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from weft.core.mesh import Mesh
from weft.core.problem import Problem
from weft.core.topology import Link, Topology
from weft.plan.balance import step_loads
from weft.plan.recipe import Recipe
from weft.simulate.critical import shared_seconds


def estimate(
    problem: Problem,
    topology: Topology,
    recipe: Recipe,
    seconds: npt.NDArray[np.float64],
    *,
    moved: tuple[float, float] = (0.0, 0.0),
    needed: float = 1.0,
) -> float:
    """`seconds[u, a, b]` is the compute of slice u between row group a and column group b.

    `moved` is the share of row and column blocks that leave home; `needed` the share of the other
    ranks' keys that a rank's tiles touch (a ring carries them all, a gather only those).
    """
    ranks, slices, ring = problem.ranks, recipe.ulysses, recipe.ring
    token = problem.batch * problem.head_dim * problem.item_bytes / ranks
    q = token * problem.heads * problem.q.size
    kv = 2 * token * problem.kv_heads * problem.kv.size
    swap = (slices - 1) / slices
    mesh = recipe.mesh
    wide = slowest(topology, mesh, "ulysses")
    long = slowest(topology, mesh, "ring")
    scatter = _messages(wide, (slices - 1), (q + kv) * swap) + _messages(
        long, (ring - 1) * bool(sum(moved)), q * moved[0] + kv * moved[1]
    )
    back = _messages(wide, slices - 1, q * swap) + _messages(long, (ring - 1) * bool(moved[0]), q * moved[0])
    by_step = step_loads(seconds + topology.call_seconds * (seconds > 0))
    if recipe.exchange == "gather":
        fetch = _messages(long, ring - 1, kv * (ring - 1) * needed)
        near, far = by_step[:, :, 0].max(), by_step[:, :, 1:].sum(axis=2).max(initial=0.0)
        middle, sent = max(near, fetch) + far, fetch
    else:
        hop = _messages(long, 1, kv) if ring > 1 else 0.0
        slow = by_step.max(axis=(0, 1))
        middle, sent = sum(max(step, hop) for step in slow[:-1]) + slow[-1], hop * (ring - 1)
    total = by_step.sum(axis=2).ravel().tolist()
    shared = shared_seconds(topology, total, [scatter + back + sent] * ranks)
    return float(max(scatter + middle + back, shared))


def _messages(link: Link, count: int, num_bytes: float) -> float:
    return count * link.latency + num_bytes / link.bandwidth if count else 0.0


def slowest(topology: Topology, mesh: Mesh, axis: str) -> Link:
    """The link that a neighbour along an axis is reached by, at worst."""
    neighbours = [pair for group in mesh.groups(axis) for pair in pairwise(group)]
    links = [topology.link(a, b) for a, b in neighbours]
    return min(links, key=lambda link: link.bandwidth, default=topology.intra)
