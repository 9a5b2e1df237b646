"""Batch: jobs of one shape that are made together, and where they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from weft.serve.jobs import Job, Shape
from weft.serve.tasks import Task


@dataclass
class Batch:
    """`ranks` is empty while it waits."""

    id: str
    members: tuple[str, ...]
    """All that its state has; `jobs` are those that somebody still waits for."""
    jobs: list[str]
    shape: Shape
    arrived: float
    deadline: float
    priority: int
    step: int = 0
    ranks: tuple[int, ...] = ()
    writer: int | None = None
    """The rank that writes its files, when all steps are done and its ranks are free for others."""
    stopping: bool = False
    dropped: float | None = None
    """When its last job was cancelled or deleted while it ran."""
    sign: float = field(default_factory=time.monotonic)
    """When it was last heard of."""
    told: dict[str, Any] = field(default_factory=dict)
    """What the last step said of itself."""

    @classmethod
    def of(cls, jobs: Sequence[Job], members: Sequence[str] = (), step: int = 0) -> Batch:
        """As urgent as the most urgent of them."""
        ids = [job.id for job in jobs]
        members = tuple(members or ids)
        return cls(
            id=members[0], members=members, jobs=ids, shape=jobs[0].asked.shape, step=step,
            arrived=min(job.created for job in jobs), deadline=min(job.deadline for job in jobs),
            priority=max(job.priority for job in jobs),
        )  # fmt: skip

    @property
    def leader(self) -> int | None:
        """The rank that tells of it; None while it waits."""
        return self.ranks[0] if self.ranks else self.writer

    def task(self) -> Task:
        return Task(
            id=self.id, shape=self.shape, left=self.shape.steps - self.step, arrived=self.arrived,
            deadline=self.deadline, priority=self.priority, ranks=self.ranks, began=True, jobs=len(self.jobs),
        )  # fmt: skip
