"""Planning: which rank computes what, by which strategy.

The package itself can be called: `weft.plan(mask, topology)` plans one attention.

    >>> import weft
    >>> mask = weft.mask("sta", grid=(8, 24, 24), heads=12)
    >>> weft.plan(mask, "8xh100")
    Plan(ulysses 0.204 ms, ulysses+balanced 1.27×; 6 timed)
    >>> weft.plan(weft.BlockMask.dense(12, 4096), "8xh100", head_dim=64, strategy="ring")
    Plan(ring 1.12 ms; 1 timed)
    >>> weft.plan(mask, tokens=weft.Layout.uneven([3000, 1608])).schedule.mesh
    Mesh(ring 2)

`print(plan.explain())` has a line for each candidate, `weft.attention(..., plan=plan)` runs it.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inspect import Signature

    from weft.core.layout import Layout
    from weft.core.mask import BlockMask
    from weft.core.topology import Topology
    from weft.plan.choose import Plan


def plan(  # noqa: PLR0913 - what an attention is
    mask: BlockMask,
    topology: Topology | str | None = None,
    *,
    head_dim: int = 128,
    batch: int = 1,
    kv_heads: int | None = None,
    dtype: str = "bfloat16",
    tokens: Layout | None = None,
    kv_tokens: Layout | None = None,
    strategy: str = "auto",
) -> Plan:
    """Return the plan of an attention with the shortest predicted time, simulated without tensors.

    mask                over the whole sequence: `weft.mask(…)`, or `weft.BlockMask.dense(heads, tokens)`.
    topology            a Topology, or the name of a cluster, such as 8xh100 or 4x8xa100. By default a machine
                        without GPUs, of as many ranks as `tokens` has.
    kv_heads            by default as many as the mask has heads.
    tokens, kv_tokens   which rank holds which tokens; by default shards that are as even as possible.
    strategy            auto; or one by its name, such as ulysses, ring or usp:4x2, which is timed alone.
    """
    from weft.core.errors import InputError
    from weft.core.layout import Layout
    from weft.core.problem import Problem
    from weft.plan.choose import choose
    from weft.simulate.clusters import cluster

    if isinstance(topology, str):
        topology = cluster(topology)
    if topology is None and tokens is None:
        raise InputError(
            "weft.plan needs the ranks.",
            hint='Pass a topology, such as "8xh100", or tokens=weft.Layout.even(size, ranks).',
        )
    q = tokens or Layout.even(mask.q_len, topology.ranks if topology else 1)
    kv = kv_tokens or (q if mask.kv_len == q.size else Layout.even(mask.kv_len, q.ranks))
    problem = Problem(
        batch=batch,
        heads=mask.heads,
        kv_heads=kv_heads or mask.heads,
        head_dim=head_dim,
        q=q,
        kv=kv,
        dtype=dtype,
    )
    return choose(problem, mask, topology, strategy=strategy)


class _CallablePackage(ModuleType):
    """A package cannot share its name with a function, so it is called itself."""

    __call__ = staticmethod(plan)

    @property
    def __signature__(self) -> Signature:  # else the first parameter would be taken for self
        from inspect import signature

        return signature(plan)


sys.modules[__name__].__class__ = _CallablePackage
