"""Small timelines and schedules, with answers that are known."""

from __future__ import annotations

from dataclasses import replace

from weft.core.layout import Layout
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.timeline import Span, Timeline
from weft.core.topology import Host, Topology
from weft.masks.grid import TokenGrid
from weft.masks.spec import mask_from_spec
from weft.plan.choose import build
from weft.simulate.clusters import cluster


def two_ranks(**fields) -> Timeline:
    """Rank 1 waits from 1 to 3 for what rank 0 sends from 1 to 3 while it computes until 2."""
    spans = (
        Span(0, "compute", "attend", "attend 0", 0.0, 1.0, op=0),
        Span(0, "comm", "send", "kv", 1.0, 3.0, op=1, peer=1, num_bytes=100),
        Span(0, "compute", "attend", "attend 1", 1.0, 2.0, op=2),
        Span(1, "compute", "attend", "attend 0", 0.0, 1.0, op=0),
        Span(1, "compute", "wait", "kv", 1.0, 3.0, op=1, peer=0),
        Span(1, "compute", "attend", "attend 2", 3.0, 4.0, op=3),
    )
    return Timeline(**({"name": "toy", "ranks": 2, "spans": spans} | fields))


def topology(name: str = "2x2xh100") -> Topology:
    # Toys take less time than launching them: without a host there is something to draw.
    return replace(cluster(name), host=Host())


def schedule(
    plan: str = "usp:2x2+balanced",
    *,
    cluster: Topology | None = None,
    heads: int = 6,
    tokens: int = 1000,
    mask: str = "random:density=0.3,cv=0.8",
) -> Schedule:
    """Of a ragged last block, on as many ranks as the cluster has."""
    cluster = cluster or topology()
    layout = Layout.even(tokens, cluster.ranks)
    problem = Problem(
        batch=1, heads=heads, kv_heads=heads, head_dim=16, q=layout, kv=layout, dtype="bfloat16"
    )
    active = mask_from_spec(mask, heads=heads, grid=TokenGrid(1, 1, tokens), block=16)
    return build(plan, problem, active, cluster)
