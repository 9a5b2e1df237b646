"""JobStore: all jobs, in SQLite. What a client is promised is on the disk before the client is answered.

    store = JobStore(folder)
    job = store.create(params, deadline=time.time() + 60)
    store.begin(job.id); store.step(job.id, 1, {}); store.complete(job.id, "video.mp4", size, {}, expires)

    queued --begin--> in_progress --complete--> completed        queued or in_progress --fail--> failed
       ^----lost, or a new start of the server----'              in_progress --lost for the 3rd time--> failed

Each arrow is one UPDATE with a condition on the status, so that two threads cannot both take it. It returns
the changed job, or None if the job is gone or has another status.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any, Literal

from weft.core.errors import InputError
from weft.serve.database import Column, Database, Values
from weft.serve.jobs import (
    KINDS,
    STATUSES,
    GenerationParams,
    Job,
    JobFailure,
    Kind,
    Status,
    checked_id,
    created_ms,
    is_id,
    new_id,
)
from weft.serve.reserve import DiskFull

_VERSION = 1
# The columns are the fields of Job in their order; `asked` holds `params`. Text is JSON except for names.
_SCHEMA = """
CREATE TABLE jobs (
    id TEXT PRIMARY KEY, asked TEXT NOT NULL, status TEXT NOT NULL, step INTEGER NOT NULL,
    created REAL NOT NULL, started REAL, completed REAL, expires REAL, priority INTEGER NOT NULL,
    deadline REAL NOT NULL, failure TEXT, attempts INTEGER NOT NULL, timings TEXT NOT NULL, output TEXT,
    size INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX jobs_status ON jobs (status);
CREATE INDEX jobs_expires ON jobs (expires) WHERE expires IS NOT NULL;
CREATE TABLE keys (
    key BLOB PRIMARY KEY, digest BLOB NOT NULL, job TEXT NOT NULL REFERENCES jobs (id) ON DELETE CASCADE
) WITHOUT ROWID;
CREATE INDEX keys_job ON keys (job);
"""
_FIELDS = tuple(field.name for field in fields(Job))
_JSON = ("params", "failure", "timings")
_PARAMS = tuple(field.name for field in fields(GenerationParams))
_ACTIVE = "status IN ('queued', 'in_progress')"
_FAILED = "status = 'failed', completed = :now, failure = :failure, expires = :expires"


class KeyReused(InputError):  # noqa: N818 - a rule for clients
    """An idempotency key was sent again with another request."""


class JobStore:
    """The jobs in `folder`. Any thread may call it; one process at a time owns it."""

    def __init__(self, folder: Path) -> None:
        self._database = Database(folder / "jobs.db", self._open)
        self.reserve = self._database.reserve
        self._last = max(
            (created_ms(job.id) for kind in KINDS for job in self.page(kind, limit=1)[0]), default=0
        )

    @staticmethod
    def _open(database: Database) -> None:
        do = database.execute
        version = do("PRAGMA user_version").fetchone()[0]
        if version == 0:
            for statement in _SCHEMA.split(";"):
                do(statement)
            do(f"PRAGMA user_version = {_VERSION}")
        elif version != _VERSION:
            raise InputError(
                f"{database.path} has version {version} of the jobs; this weft reads version {_VERSION}.",
                hint="Serve with the weft that made it, or from another folder.",
            )
        # Nothing runs yet: what an earlier server began waits again, and no loss is counted.
        do("UPDATE jobs SET status = 'queued' WHERE status = 'in_progress'")

    def close(self) -> None:
        self._database.close()

    def create(
        self, params: GenerationParams, *, deadline: float, priority: int = 0, key: str | None = None,
        body: bytes = b"", before: Callable[[str], None] = lambda _: None,
    ) -> Job:  # fmt: skip
        """Store and return a queued job, or return the job that was created with `key` and the same body.

        Raises DiskFull rather than use the reserve: that is for jobs that were accepted.

        before   called with the new id before the job is stored: if the job is there, so is what this writes,
                 and if it raises there is no job. Not called if an earlier job is returned.
        """
        digest = hashlib.sha256(params.kind.encode() + b"\n" + body).digest()

        def insert() -> Job:
            earlier = key is not None and self._keyed(key, digest)
            if earlier:
                return earlier
            if self.reserve.is_full:
                raise DiskFull("The disk of the server is full.", hint="Delete some jobs.")
            now = time.time()
            # Later jobs have later ids even if the clock does not move: no page skips one or has it twice.
            self._last = max(int(now * 1000), self._last + 1)
            id = new_id(params.kind, self._last)
            before(id)
            job = Job(id=id, params=params, created=now, priority=priority, deadline=deadline)
            row = _to_row(job)
            self._database.execute(f"INSERT INTO jobs VALUES ({', '.join('?' * len(row))})", row)
            if key is not None:
                self._database.execute("INSERT INTO keys VALUES (?, ?, ?)", (_bytes(key), digest, job.id))
            return job

        return self._database.write(insert, durable=True, spare=False)

    def _keyed(self, key: str, digest: bytes) -> Job | None:
        rows = self._database.rows("SELECT digest, job FROM keys WHERE key = ?", (_bytes(key),))
        if not rows:
            return None
        if rows[0][0] != digest:
            raise KeyReused(
                f"The idempotency key {key[:80]!r} was sent before with another request.",
                hint="Send the same request again, or this one with a new key.",
            )
        return self._first("SELECT * FROM jobs WHERE id = ?", (rows[0][1],))

    def get(self, id: str) -> Job | None:
        return self._first("SELECT * FROM jobs WHERE id = ?", (id,)) if is_id(id) else None

    def page(
        self, kind: Kind, *, limit: int, order: Literal["asc", "desc"] = "desc", after: str | None = None
    ) -> tuple[list[Job], bool]:
        """Return up to `limit` jobs after the job `after`, which may be gone, and whether there are more."""
        if order not in ("asc", "desc"):
            raise InputError(f"order must be asc or desc, got {order!r}.")
        low, high = f"{kind}_", f"{kind}_~"
        if after is not None:
            if not low < checked_id(after) < high:
                raise InputError(f"{after} is not the id of a {kind}.", hint=f"It must begin with {low}.")
            low, high = (after, high) if order == "asc" else (low, after)
        query = f"SELECT * FROM jobs WHERE id > ? AND id < ? ORDER BY id {order} LIMIT ?"
        jobs = self._all(query, (low, high, limit + 1))
        return jobs[:limit], len(jobs) > limit

    def active(self) -> list[Job]:
        """Return the jobs that have not ended, the oldest first."""
        return self._all(f"SELECT * FROM jobs WHERE {_ACTIVE} ORDER BY created, id")

    def expired(self, now: float) -> list[Job]:
        """Return the jobs that have expired, the first to expire first."""
        return self._all("SELECT * FROM jobs WHERE expires <= ? ORDER BY expires, id", (now,))

    def counts(self) -> dict[Status, int]:
        counts = dict(self._database.rows("SELECT status, count(*) FROM jobs GROUP BY status"))
        return {status: counts.get(status, 0) for status in STATUSES}

    def queued(self) -> dict[str, int]:
        """Return the number of queued jobs by kind."""
        query = "SELECT substr(id, 1, instr(id, '_') - 1) kind, count(*) FROM jobs "
        return dict(self._database.rows(query + "WHERE status = 'queued' GROUP BY kind"))

    def begin(self, id: str) -> Job | None:
        """Move a job to in_progress. How long it waited for its first ranks is its timing `queue`."""
        now = time.time()
        change = "status = 'in_progress', started = coalesce(started, :now), "
        change += "timings = json_set(timings, '$.queue', coalesce(started, :now) - created)"
        return self._move(id, change, "status = 'queued'", durable=False, now=now)

    def step(self, id: str, step: int, timings: Mapping[str, float]) -> Job | None:
        """Note that `step` steps are done. Steps repeated after a loss are neither progress nor setback."""
        change = "attempts = iif(:step > step, 0, attempts), step = max(step, :step), "
        change += "timings = json_patch(timings, :timings)"
        values = {"step": step, "timings": _json(timings)}
        return self._move(id, change, "status = 'in_progress'", durable=False, **values)

    def lost(
        self, id: str, limit: int = 3, *, expires: float | None = None, blamed: bool = True
    ) -> Job | None:
        """Queue a job again after its ranks were lost; at `limit` losses without one new step, fail it.

        A loss that the job is not `blamed` for is not counted.
        """
        often = f"Its ranks were lost {limit} times without one new step in between."
        failure = _json({"code": "rank_lost", "message": often})
        counts = f"attempts + {int(blamed)}"
        running, more = "status = 'in_progress'", f"attempts = {counts}"
        values = {"now": time.time(), "failure": failure, "expires": expires}

        def change() -> Job | None:
            again = self._update(
                id, f"status = 'queued', {more}", f"{running} AND {counts} < :limit", limit=limit
            )
            return again or self._update(id, f"{_FAILED}, {more}", running, **values)

        return self._database.write(change, durable=True)

    def complete(
        self, id: str, output: str, size: int, timings: Mapping[str, float], expires: float | None
    ) -> Job | None:
        """Complete a job with the file `output`, which must be on the disk by now."""
        change = (
            "status = 'completed', completed = :now, output = :output, size = :size, expires = :expires, "
        )
        change += "attempts = 0, timings = json_patch(timings, :timings)"
        values = {"output": output, "size": size, "timings": _json(timings), "expires": expires}
        return self._move(id, change, "status = 'in_progress'", now=time.time(), **values)

    def fail(self, id: str, failure: JobFailure, *, expires: float | None = None) -> Job | None:
        """Fail a job, which has no result: refused, out of memory, cancelled."""
        values = {"now": time.time(), "failure": _json(asdict(failure)), "expires": expires}
        return self._move(id, _FAILED, _ACTIVE, **values)

    def delete(self, id: str) -> Job | None:
        """Delete and return a job; its idempotency key is free again."""
        if not is_id(id):
            return None
        query = "DELETE FROM jobs WHERE id = ? RETURNING *"
        return self._database.write(lambda: self._first(query, (id,)), durable=True)

    def _move(
        self, id: str, change: str, condition: str, *, durable: bool = True, **values: Column
    ) -> Job | None:
        return self._database.write(lambda: self._update(id, change, condition, **values), durable=durable)

    def _update(self, id: str, change: str, condition: str, **values: Column) -> Job | None:
        query = f"UPDATE jobs SET {change} WHERE id = :id AND {condition} RETURNING *"
        return self._first(query, {"id": id, **values})

    def _first(self, query: str, values: Values) -> Job | None:
        rows = self._database.rows(query, values)
        return _to_job(rows[0]) if rows else None

    def _all(self, query: str, values: Values = ()) -> list[Job]:
        return [_to_job(row) for row in self._database.rows(query, values)]


def _to_row(job: Job) -> tuple[Any, ...]:
    plain = asdict(job)
    return tuple(
        _json(value) if name in _JSON and value is not None else value for name, value in plain.items()
    )


def _to_job(row: tuple[Any, ...]) -> Job:
    plain = dict(zip(_FIELDS, row, strict=True))
    params, failure, timings = (json.loads(plain[name] or "null") for name in _JSON)
    known = {name: params[name] for name in _PARAMS if name in params}
    failure = failure and JobFailure(**failure)
    return Job(**plain | {"params": GenerationParams(**known), "failure": failure, "timings": timings})


def _json(plain: Mapping[str, Any]) -> str:
    # ASCII: a prompt may hold half of a surrogate pair, which SQLite's UTF-8 does not take.
    return json.dumps(plain, allow_nan=False)


def _bytes(key: str) -> bytes:
    return key.encode(errors="surrogatepass")
