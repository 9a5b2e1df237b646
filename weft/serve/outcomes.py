"""Outcomes: results and failures of jobs, held until the disk has taken them.

    outcomes.add(JobOutcome(id, JobFailure(…)))      # stored now if the disk has room
    outcomes.settle()                                  # later: try again, in the engine's thread

A job whose outcome is held stays `in_progress`, with its last state: a server that is killed meanwhile makes
its result again.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from weft.core.errors import InputError
from weft.serve.api_error import is_out_of_descriptors
from weft.serve.disk import Disk, OverQuota
from weft.serve.job_store import JobStore
from weft.serve.jobs import JobFailure
from weft.serve.messages import JobEnded
from weft.serve.reserve import DiskFull

MAX_HELD_BYTES = 256 * 2**20
MAX_HELD_SECONDS = 600.0
"""Limits of results in memory. Beyond either a result is dropped, and its job fails with `disk_full`."""
NO_ROOM = JobFailure(
    code="disk_full",
    message="The disk of the server had no room for the result. Make room, and submit it again.",
)
NOT_WRITTEN = JobFailure(
    code="internal_error", message="The result could not be written. The log of the server has the reason."
)
_log = logging.getLogger("weft.serve")


@dataclass
class JobOutcome:
    """How a job ended: a failure, or the file `name` with `data`."""

    id: str
    failure: JobFailure | None = None
    name: str = ""
    data: bytes = b""
    timings: dict[str, float] = field(default_factory=dict)
    size: int = 0
    is_written: bool = False
    since: float = field(default_factory=time.monotonic)


class Outcomes:
    """`emit` receives a `JobEnded` for each job, once its outcome is on the disk."""

    def __init__(self, store: JobStore, disk: Disk, emit: Callable[[JobEnded], None], *, keep: float) -> None:
        self._store, self._disk, self._emit, self._keep = store, disk, emit, keep
        self._held: dict[str, JobOutcome] = {}

    def __contains__(self, id: str) -> bool:
        return id in self._held

    def __len__(self) -> int:
        return len(self._held)

    @property
    def needed(self) -> int:
        """Bytes of the largest result that is held."""
        return max((len(each.data) for each in self._held.values()), default=0)

    def add(self, outcome: JobOutcome) -> None:
        outcome.size = len(outcome.data)
        try:
            if self._store_now(outcome):
                return
        except DiskFull:
            self._store.reserve.release()
        self._held[outcome.id] = outcome

    def drop(self, id: str) -> None:
        self._held.pop(id, None)

    def settle(self) -> None:
        """Store the held outcomes for which there is now room on the disk."""
        for outcome in list(self._held.values()):
            with suppress(DiskFull):
                if self._store_now(outcome):
                    self.drop(outcome.id)

    def _store_now(self, outcome: JobOutcome) -> bool:
        """Store it, or return False or raise DiskFull if it has to be tried again."""
        expires = time.time() + self._keep
        try:
            if outcome.failure is None and not outcome.is_written:
                self._write(outcome)
            if outcome.failure is not None:
                job = self._store.fail(outcome.id, outcome.failure, expires=expires)
            else:
                job = self._store.complete(outcome.id, outcome.name, outcome.size, outcome.timings, expires)
        except DiskFull:
            raise
        except (InputError, sqlite3.OperationalError) as error:  # such as an I/O error, which may pass
            _log.warning("an outcome could not be stored yet", extra={"job": outcome.id, "why": str(error)})
            return False
        if job is None:
            self._disk.remove(outcome.id)  # it was cancelled or deleted meanwhile
        self._emit(JobEnded(outcome.id, job))
        self._disk.drop_state(outcome.id)
        return True

    def _write(self, outcome: JobOutcome) -> None:
        try:
            self._disk.write(outcome.id, outcome.name, outcome.data)
            outcome.is_written = True
        except OverQuota as error:
            outcome.failure = JobFailure(code="disk_full", message=str(error))
        except InputError as error:
            is_full = isinstance(error, DiskFull)
            if (is_full or is_out_of_descriptors(error)) and self._may_hold(outcome):
                raise
            if not is_full:
                _log.exception("a result could not be written", extra={"job": outcome.id})
            outcome.failure = NO_ROOM if is_full else NOT_WRITTEN
        outcome.data = b""

    def _may_hold(self, outcome: JobOutcome) -> bool:
        held = sum(len(each.data) for each in self._held.values() if each is not outcome)
        is_late = time.monotonic() - outcome.since > MAX_HELD_SECONDS
        return not is_late and held + len(outcome.data) <= MAX_HELD_BYTES
