"""Mesh: ranks on named axes, the last axis running fastest."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from weft.core.codec import Value
from weft.core.errors import InputError

MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Mesh(Value):
    """Named axes and their sizes.

    >>> Mesh.of(ring=2, ulysses=3).coordinate(4)
    {'ring': 1, 'ulysses': 1}
    """

    axes: tuple[tuple[str, int], ...]
    order: tuple[int, ...] = ()
    """The rank at each position, where that is not the position itself: two axes may share a machine."""

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        if len(set(names)) != len(names):
            raise InputError(f"Mesh axes {names} repeat a name.", hint="Give each axis a name of its own.")
        for name, size in self.axes:
            if size < 1:
                raise InputError(f"Mesh axis {name!r} must have size ≥ 1, got {size}.")
        if self.ranks > MAX_RANKS:
            raise InputError(f"A mesh has at most {MAX_RANKS:,} ranks, got {self.ranks:,}.")
        if self.order and sorted(self.order) != list(range(self.ranks)):
            raise InputError(
                f"The order {self.order} does not place {self.ranks} ranks on {self}.",
                hint=f"Name each of 0 to {self.ranks - 1} once.",
            )

    @staticmethod
    def of(**axes: int) -> Mesh:
        return Mesh(tuple(axes.items()))

    def arranged(self, order: tuple[int, ...]) -> Mesh:
        """Return the same axes with the ranks in this order."""
        return replace(self, order=() if order == tuple(range(len(order))) else order)

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.order or range(self.ranks))}

    @cached_property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, axis: str) -> int:
        """Return the size of an axis, 1 if the mesh does not have it."""
        return dict(self.axes).get(axis, 1)

    def coordinate(self, rank: int) -> dict[str, int]:
        if not 0 <= rank < self.ranks:
            raise InputError(f"Rank {rank} is not on {self}.", hint=f"Ranks run from 0 to {self.ranks - 1}.")
        at: dict[str, int] = {}
        position = self._position[rank]
        for name, size in reversed(self.axes):
            position, at[name] = divmod(position, size)
        return {name: at[name] for name, _ in self.axes}

    def rank(self, **coordinate: int) -> int:
        """Return the rank at a coordinate; axes that are left out count as 0."""
        if unknown := set(coordinate) - {name for name, _ in self.axes}:
            raise InputError(f"{self} has no axis {sorted(unknown)[0]!r}.")
        position = 0
        for name, size in self.axes:
            at = coordinate.get(name, 0)
            if not 0 <= at < size:
                raise InputError(f"{name}={at} is not on {self}.", hint=f"It runs from 0 to {size - 1}.")
            position = position * size + at
        return self.order[position] if self.order else position

    def groups(self, axis: str) -> tuple[tuple[int, ...], ...]:
        """Return groups of the ranks that differ only along `axis`, each in axis order."""
        if axis not in dict(self.axes):
            return tuple((rank,) for rank in range(self.ranks))
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in self.order or range(self.ranks):
            others = tuple(i for name, i in self.coordinate(rank).items() if name != axis)
            groups.setdefault(others, []).append(rank)
        return tuple(tuple(group) for group in groups.values())

    def __repr__(self) -> str:
        return f"Mesh({self}{', arranged' * bool(self.order)})"

    def __str__(self) -> str:
        return " × ".join(f"{name} {size}" for name, size in self.axes)
