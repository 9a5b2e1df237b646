"""What is to be scheduled, on what, and what a policy is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from weft.core.errors import InputError
from weft.serve.jobs import Shape


@dataclass(frozen=True, kw_only=True)
class Task:
    """A job, or a batch that began: as one it is stopped, moved and ended."""

    id: str
    shape: Shape
    left: int
    """Steps; at 0 it is decoded, and can not be moved any more."""
    arrived: float
    deadline: float
    priority: int = 0
    ranks: tuple[int, ...] = ()
    """Where it runs now."""
    began: bool = False
    jobs: int = 1


@dataclass(frozen=True)
class Grant:
    """A task, or several of equal shape that begin as one batch, and its ranks."""

    tasks: tuple[str, ...]
    ranks: tuple[int, ...]


class Times(Protocol):
    """What a policy asks of `Latency`. A step that does not fit in memory takes for ever (`inf`)."""

    @property
    def switch(self) -> float:
        """Seconds to stop a task and have it run elsewhere."""
        ...

    def step(self, shape: Shape, ranks: int, jobs: int = 1) -> float: ...

    def fixed(self, shape: Shape) -> float: ...


Policy = Callable[[Sequence[Task], float, int, Times], list[Grant]]


def sizes(world: int) -> list[int]:
    """Ranks that a group may have: powers of two, and all.

    >>> sizes(6)
    [1, 2, 4, 6]
    """
    if world < 1:
        raise InputError(f"A world of {world} ranks.", hint="Give 1 or more.")
    return [*(1 << bit for bit in range((world - 1).bit_length())), world]


def groups(world: int) -> list[tuple[int, ...]]:
    """Every group that a task can be given: neighbours, from a multiple of their number on.

    >>> groups(3)
    [(0,), (1,), (2,), (0, 1), (0, 1, 2)]
    """
    return [
        tuple(range(start, start + size))
        for size in sizes(world)
        for start in range(0, world - size + 1, size)
    ]
