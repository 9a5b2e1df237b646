"""Strategy: one way to run an attention: what travels, on which mesh, with which balance; and its name.

Each kind is one file of weft/plan/strategies. After its name may stand a balance:

…+balanced      heads and blocks dealt by load       …+cuts        blocks in order, cut by load
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from weft.core.errors import InputError
from weft.core.mask import BlockMask
from weft.core.mesh import Mesh
from weft.core.partition import Partition
from weft.core.problem import Problem
from weft.core.schedule import Schedule
from weft.core.topology import Topology
from weft.plan.assignment import AssignmentCost

BALANCES = ("none", "balanced", "cuts", "zigzag")


@dataclass(frozen=True)
class Strategy(ABC):
    """Heads over `ulysses` ranks, tokens over `ring`. A kind needs a `kind` and a `build`, no more."""

    ulysses: int
    ring: int
    balance: str = "none"

    kind: ClassVar[str]
    """Its name is `kind:UxR`, or short."""
    options: ClassVar[str] = ""
    """What may follow UxR, as a regular expression: groups are fields, and numbers. `tail` writes them."""
    across: ClassVar[bool] = False
    """Whether machines are put on the Ulysses axis first."""
    order: ClassVar[int] = 9
    """Of kinds that are equally fast the lowest is chosen."""
    costly: ClassVar[bool] = False
    """Whether it has many messages, and takes long to build and to time: chosen for a reason only."""

    @classmethod
    def short(cls, ranks: int) -> dict[str, tuple[int, int]]:
        """Names that need no numbers: what they are on so many ranks."""
        return {cls.kind: (1, ranks)}

    @classmethod
    def candidates(cls, ulysses: int, ring: int, topology: Topology) -> Sequence[Strategy]:
        """What of this U × R could be the fastest; all need an `estimate`. None: it has to be named."""
        del ulysses, ring, topology
        return ()

    @abstractmethod
    def build(self, problem: Problem, mask: BlockMask, partition: Partition, topology: Topology) -> Schedule:
        """Build the schedule, named after the strategy."""

    def estimate(self, problem: Problem, topology: Topology, cost: AssignmentCost) -> float:
        """Return seconds by a closed form, which prunes strategies before they are built."""
        raise NotImplementedError(f"{self} has candidates, so it needs an estimate.")

    def tuned(self, topology: Topology) -> Sequence[Strategy]:
        """Settings among which the closed form chooses; the first and the last of the best are timed too."""
        del topology
        return (self,)

    @property
    def tail(self) -> str:
        """The options, as they are written."""
        return ""

    @property
    def mesh(self) -> Mesh:
        """On one machine. The last axis runs fastest: it is the one inside a machine."""
        if self.across:
            return Mesh.of(ulysses=self.ulysses, ring=self.ring)
        return Mesh.of(ring=self.ring, ulysses=self.ulysses)

    def mesh_on(self, topology: Topology) -> Mesh:
        """Return the mesh on these machines. With `across`, the Ulysses axis spans as many as possible."""
        if not self.across or topology.machines == 1:
            return self.mesh
        if topology.ranks != self.ulysses * self.ring:
            raise InputError(
                f"{self} is for {self.ulysses * self.ring} ranks, {topology.name} has {topology.ranks}."
            )
        return placed(self.ulysses, topology.machines, topology.devices)

    def __str__(self) -> str:
        shape, short = (self.ulysses, self.ring), self.short(self.ulysses * self.ring)
        numbers = f"{self.kind}:{self.ulysses}x{self.ring}{self.tail}"
        name = next((name for name, of in short.items() if of == shape and not self.tail), numbers)
        if self.balance == "zigzag" and name == "ring":
            return "zigzag"
        return name if self.balance == "none" else f"{name}+{self.balance}"


def factors(ranks: int) -> list[tuple[int, int]]:
    """Every (ulysses, ring) whose product is `ranks`.

    >>> factors(6)
    [(1, 6), (2, 3), (3, 2), (6, 1)]
    """
    return [(u, ranks // u) for u in range(1, ranks + 1) if ranks % u == 0]


def most_machines(ulysses: int, machines: int, devices: int) -> int:
    """The most machines that can be on the Ulysses axis: a divisor of both, the rest of it on devices.

    >>> most_machines(4, 2, 8), most_machines(2, 3, 2), most_machines(6, 3, 2)
    (2, 1, 3)
    """
    fits = (n for n in range(machines, 0, -1) if machines % n == ulysses % n == 0)
    return next(n for n in fits if devices % (ulysses // n) == 0)


def placed(ulysses: int, machines: int, devices: int) -> Mesh:
    """Ulysses over as many machines as it can; device i only ever has to do with device i of the others.

    Position (ulysses = torus·u + i, ring = group·r + j) is device i·r + j of machine group·N_u + torus.
    """
    torus = most_machines(ulysses, machines, devices)
    inside = ulysses // torus
    groups, hops = machines // torus, devices // inside
    order = tuple(
        (group * torus + t) * devices + i * hops + j
        for t in range(torus)
        for i in range(inside)
        for group in range(groups)
        for j in range(hops)
    )
    return Mesh.of(ulysses=ulysses, ring=groups * hops).arranged(order)
