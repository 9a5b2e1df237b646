"""Swapped: as USP, with the rings inside machines and the heads between them."""

from __future__ import annotations

from collections.abc import Sequence

from weft.core.topology import Topology
from weft.plan.strategies.usp import Usp
from weft.plan.strategy import Strategy


class Swapped(Usp):
    kind, order, across = "swapped", 1, True

    @classmethod
    def candidates(cls, ulysses: int, ring: int, topology: Topology) -> Sequence[Strategy]:
        return (cls(ulysses, ring),) if min(ulysses, ring, topology.machines) > 1 else ()
