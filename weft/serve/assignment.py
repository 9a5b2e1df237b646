"""Assignment of ranks to batches: legal groups of ranks, and what a scheduling policy is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.core.errors import InputError
from weft.serve.batch import Batch
from weft.serve.jobs import JobShape


@dataclass(frozen=True)
class RankAssignment:
    """Ids of a batch, or of several of equal shape that begin as one, and its ranks."""

    batches: tuple[str, ...]
    ranks: tuple[int, ...]


class StepTimes(Protocol):
    """Predictions that policies use. A step that does not fit in memory takes `inf`."""

    @property
    def switch(self) -> float:
        """Seconds to stop a batch and continue it on other ranks."""
        ...

    def step(self, shape: JobShape, ranks: int, jobs: int = 1) -> float: ...

    def fixed(self, shape: JobShape) -> float: ...


Policy = Callable[[Sequence[Batch], float, int, StepTimes], list[RankAssignment]]


def sizes(world: int) -> list[int]:
    """Return the legal sizes of a group: powers of two, and all ranks.

    >>> sizes(6)
    [1, 2, 4, 6]
    """
    if world < 1:
        raise InputError(f"world must be >= 1, got {world}.")
    return [*(1 << bit for bit in range((world - 1).bit_length())), world]


def groups(world: int) -> list[tuple[int, ...]]:
    """Return every group that a batch can run on: neighbors, from a multiple of their number on.

    >>> groups(3)
    [(0,), (1,), (2,), (0, 1), (0, 1, 2)]
    """
    return [
        tuple(range(start, start + size))
        for size in sizes(world)
        for start in range(0, world - size + 1, size)
    ]
