"""Batch: jobs of one shape that run together, and how far they are."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from weft.serve.jobs import Job, JobShape
from weft.serve.messages import StepDone


@dataclass(kw_only=True)
class Batch:
    """`ranks` is empty while it waits. Policies schedule batches; a job that waits is a batch of one."""

    id: str
    jobs: list[str]
    """Those that have not ended."""
    members: tuple[str, ...] = ()
    """All jobs in its saved state."""
    shape: JobShape
    arrived: float
    deadline: float
    priority: int = 0
    step: int = 0
    ranks: tuple[int, ...] = ()
    began: bool = False
    writer: int | None = None
    """The rank that writes its files, when all steps are done and its ranks are free for others."""
    stopping: bool = False
    dropped: float | None = None
    """When its last job was cancelled or deleted while it ran."""
    last_message: float = field(default_factory=time.monotonic)
    last_step: StepDone | None = None

    @classmethod
    def of(
        cls, jobs: Sequence[Job], members: Sequence[str] = (), step: int = 0, *, began: bool = True
    ) -> Batch:
        """Return a batch that is as urgent as the most urgent of its jobs."""
        ids = [job.id for job in jobs]
        members = tuple(members or ids)
        return cls(
            id=members[0], members=members, jobs=ids, shape=jobs[0].params.shape, step=step, began=began,
            arrived=min(job.created for job in jobs), deadline=min(job.deadline for job in jobs),
            priority=max(job.priority for job in jobs),
        )  # fmt: skip

    @property
    def left(self) -> int:
        """Steps to do. At 0 it is being decoded, and cannot be moved any more."""
        return self.shape.steps - self.step

    @property
    def leader(self) -> int | None:
        """The rank that sends messages about it; None while it waits."""
        return self.ranks[0] if self.ranks else self.writer
