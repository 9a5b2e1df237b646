"""Recipe: one way to run an attention, by name: its exchange, its mesh and its balance.

ulysses         heads over all ranks                 gather        each rank fetches the keys it needs
ring            keys and values travel around        usp:4x2       heads over 4, a ring over 2
swapped:4x2     as usp, the ring inside a machine    gather:4x2    heads over 4, fetched over 2
torus:4x2       as swapped, in stages by machine     torus:4x2c2d1 in halves, 1 own stage left for the end
…+balanced      heads and blocks dealt by load       …+cuts        blocks in order, cut by load
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.core.codec import value
from weft.core.errors import InputError
from weft.core.mesh import Mesh
from weft.core.topology import Topology

BALANCES = ("none", "balanced", "cuts", "zigzag")
NAMES = ("ulysses", "ring", "zigzag", "gather")


@value
@dataclass(frozen=True)
class Recipe:
    """`ulysses` × `ring` ranks; `exchange` is usp (a ring), swapped (the ring inside), torus or gather."""

    ulysses: int
    ring: int
    exchange: str = "usp"
    balance: str = "none"
    chunks: int = 1
    """Torus: parts of what comes from one machine."""
    defer: int | None = None
    """Torus: stages whose keys the queries at home meet only at the end; None: all."""

    @property
    def across(self) -> bool:
        """Whether machines are put on the Ulysses axis first."""
        return self.exchange in ("swapped", "torus")

    @property
    def mesh(self) -> Mesh:
        """On one machine. The last axis runs fastest: it is the one inside a machine."""
        if self.across:
            return Mesh.of(ulysses=self.ulysses, ring=self.ring)
        return Mesh.of(ring=self.ring, ulysses=self.ulysses)

    def mesh_on(self, topology: Topology) -> Mesh:
        """On these machines: swapped and torus take as many of them on the Ulysses axis as they can."""
        if not self.across or topology.machines == 1:
            return self.mesh
        if topology.ranks != self.ulysses * self.ring:
            raise InputError(
                f"{self} is for {self.ulysses * self.ring} ranks, {topology.name} has {topology.ranks}."
            )
        return placed(self.ulysses, topology.machines, topology.devices)

    def __str__(self) -> str:
        name = self._exchange()
        if self.balance == "zigzag" and name == "ring":
            return "zigzag"
        return name if self.balance == "none" else f"{name}+{self.balance}"

    def _exchange(self) -> str:
        if self.exchange == "torus":
            tail = "" if self.defer is None else f"d{self.defer}"
            parts = "" if self.chunks == 1 else f"c{self.chunks}"
            return f"torus:{self.ulysses}x{self.ring}{parts}{tail}"
        if self.exchange == "gather":
            return "gather" if self.ulysses == 1 else f"gather:{self.ulysses}x{self.ring}"
        if self.ulysses == 1:
            return "ring"
        if self.ring == 1:
            return "ulysses"
        return f"{self.exchange}:{self.ulysses}x{self.ring}"

    @staticmethod
    def parse(name: str, ranks: int) -> Recipe:
        """The recipe of a name, for so many ranks."""
        shape = r"(?:(usp|swapped|gather)|torus):(\d+)x(\d+)(?(1)|(?:c(\d+))?(?:d(\d+))?)(?:\+(\w+))?"
        match = re.fullmatch(shape, name)
        if match:
            ulysses, ring = int(match[2]), int(match[3])
            if ulysses * ring != ranks:
                legal = ", ".join(f"{match[1] or 'torus'}:{u}x{r}" for u, r in factors(ranks))
                raise InputError(
                    f"{name} needs {ulysses * ring} ranks; there are {ranks}.", hint=f"Legal here: {legal}."
                )
            if match[4] and not int(match[4]):
                raise InputError(f"{name}: c0 leaves nothing to send.", hint="Use c1 or more.")
            chunks, defer = int(match[4] or 1), int(match[5]) if match[5] else None
            return Recipe(ulysses, ring, match[1] or "torus", _balance(match[6], name), chunks, defer)
        plain, _, balance = name.partition("+")
        if plain not in NAMES:
            raise InputError(
                f"There is no strategy {name!r}.",
                hint=f"Use auto, {', '.join(NAMES)}, usp:UxR, swapped:UxR, torus:UxR or gather:UxR; "
                "add +balanced or +cuts.",
            )
        how = _balance(balance, name)
        if plain == "zigzag":
            if how not in ("none", "zigzag"):
                raise InputError(f"{name}: zigzag is a balance itself.", hint=f"Use zigzag or ring+{how}.")
            return Recipe(1, ranks, balance="zigzag")
        ulysses, ring = (ranks, 1) if plain == "ulysses" else (1, ranks)
        return Recipe(ulysses, ring, "gather" if plain == "gather" else "usp", how)


def _balance(word: str | None, name: str) -> str:
    if word and word not in BALANCES:
        raise InputError(f"{name}: there is no balance {word!r}.", hint=f"Use one of {', '.join(BALANCES)}.")
    return word or "none"


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
