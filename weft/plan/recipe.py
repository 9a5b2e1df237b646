"""Recipe: one way to run an attention, by name: its exchange, its mesh and its balance.

ulysses         heads over all ranks                 gather        each rank fetches the keys it needs
ring            keys and values travel around        usp:4x2       heads over 4, a ring over 2
swapped:4x2     as usp, the ring inside a machine    gather:4x2    heads over 4, fetched over 2
…+balanced      heads and blocks dealt by load       …+cuts        blocks in order, cut by load
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.core.codec import value
from weft.core.errors import InputError
from weft.core.mesh import Mesh

BALANCES = ("none", "balanced", "cuts", "zigzag")
NAMES = ("ulysses", "ring", "zigzag", "gather")


@value
@dataclass(frozen=True)
class Recipe:
    """`ulysses` × `ring` ranks; `exchange` is usp (a ring), swapped (the ring inside) or gather."""

    ulysses: int
    ring: int
    exchange: str = "usp"
    balance: str = "none"

    @property
    def mesh(self) -> Mesh:
        """The last axis runs fastest: it is the one inside a machine."""
        if self.exchange == "swapped":
            return Mesh.of(ulysses=self.ulysses, ring=self.ring)
        return Mesh.of(ring=self.ring, ulysses=self.ulysses)

    def __str__(self) -> str:
        name = self._exchange()
        if self.balance == "zigzag" and name == "ring":
            return "zigzag"
        return name if self.balance == "none" else f"{name}+{self.balance}"

    def _exchange(self) -> str:
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
        match = re.fullmatch(r"(usp|swapped|gather):(\d+)x(\d+)(?:\+(\w+))?", name)
        if match:
            ulysses, ring = int(match[2]), int(match[3])
            if ulysses * ring != ranks:
                legal = ", ".join(f"{match[1]}:{u}x{r}" for u, r in factors(ranks))
                raise InputError(
                    f"{name} needs {ulysses * ring} ranks; there are {ranks}.", hint=f"Legal here: {legal}."
                )
            return Recipe(ulysses, ring, match[1], _balance(match[4], name))
        plain, _, balance = name.partition("+")
        if plain not in NAMES:
            raise InputError(
                f"There is no strategy {name!r}.",
                hint=f"Use auto, {', '.join(NAMES)}, usp:UxR, swapped:UxR or gather:UxR; "
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
