"""Decide: who computes what, by which strategy.

The package itself can be called: `weft.plan(problem, mask, topology)` is `weft.plan.choose.choose`.

    >>> import weft
    >>> tokens = weft.Layout.even(4096, 8)
    >>> problem = weft.Problem(batch=1, heads=12, kv_heads=12, head_dim=64, q=tokens, kv=tokens)
    >>> plan = weft.plan(problem, topology="8xh100")
    >>> plan.schedule
    Schedule(gather on ring 8 × ulysses 1: 1 exchanges, 16 attends)
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weft.core.mask import BlockMask
    from weft.core.problem import Problem
    from weft.core.topology import Topology
    from weft.plan.choose import Plan


class _CallablePackage(ModuleType):
    """A package cannot share its name with a function, so it is called itself."""

    def __call__(
        self, problem: Problem, mask: BlockMask | None = None, topology: Topology | str | None = None
    ) -> Plan:
        """Return the plan with the shortest predicted time, see `weft.plan.choose.choose`."""
        from weft.plan.choose import choose

        return choose(problem, mask, topology)


sys.modules[__name__].__class__ = _CallablePackage
