"""Every job, in SQLite: what was promised to a client is on the disk before the client hears of it.

    store = Store(folder)
    job = store.create(asked, deadline=time.time() + 60)
    store.begin(job.id); store.step(job.id, 1, {}); store.complete(job.id, "video.mp4", size, {}, expires)

    queued --begin--> in_progress --complete--> completed        queued or in_progress --fail--> failed
       ^----lost, or a new start of the server----'              in_progress --lost for the 3rd time--> failed

Each arrow is one UPDATE that names where it may start, so two threads cannot both take it; it returns the job
after it, or None where the job is gone or elsewhere.
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
from weft.serve.database import Database
from weft.serve.jobs import (
    KINDS,
    STATUSES,
    Asked,
    Failure,
    Job,
    Kind,
    Status,
    born,
    checked_id,
    is_id,
    new_id,
)
from weft.serve.reserve import DiskFull

_VERSION = 1
# The columns are the fields of Job, in their order. Text is JSON except for names.
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
_JSON = ("asked", "failure", "timings")
_ACTIVE = "status IN ('queued', 'in_progress')"
_FAILED = "status = 'failed', completed = :now, failure = :failure, expires = :expires"


class KeyReused(InputError):  # noqa: N818 - a rule of the key, told to its sender
    """An idempotency key that came again with another request."""


class Store:
    """The jobs in `folder`; any thread may call it, one process at a time owns it."""

    def __init__(self, folder: Path) -> None:
        self._database = Database(folder / "jobs.db", self._open)
        self.reserve = self._database.reserve
        self._last = max((born(job.id) for kind in KINDS for job in self.page(kind, limit=1)[0]), default=0)

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
        # Nothing runs yet: what a server before us had begun waits again, and it was not the job's fault.
        do("UPDATE jobs SET status = 'queued' WHERE status = 'in_progress'")

    def close(self) -> None:
        self._database.close()

    def create(
        self, asked: Asked, *, deadline: float, priority: int = 0, key: str | None = None, body: bytes = b"",
        before: Callable[[str], object] = lambda _: None,
    ) -> Job:  # fmt: skip
        """A queued job; or, where `key` came before with the same body, the job of that time.

        Raises DiskFull rather than use the reserve: that is for jobs that were accepted.

        before   called with the new id when nobody knows it yet: what it writes is there if the job is, and
                 if it raises there is no job. Not called where the earlier job is returned.
        """
        digest = hashlib.sha256(asked.kind.encode() + b"\n" + body).digest()

        def insert() -> Job:
            earlier = key is not None and self._keyed(key, digest)
            if earlier:
                return earlier
            if self.reserve.is_full:
                raise DiskFull("The disk of the server is full.", hint="Delete some jobs.")
            now = time.time()
            # Later jobs have later ids even if the clock does not move: no page skips one or has it twice.
            self._last = max(int(now * 1000), self._last + 1)
            id = new_id(asked.kind, self._last)
            before(id)
            job = Job(id=id, asked=asked, created=now, priority=priority, deadline=deadline)
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
                f"The idempotency key {key[:80]!r} came before, with another request.",
                hint="Send the same request again, or this one with a new key.",
            )
        return self._first("SELECT * FROM jobs WHERE id = ?", (rows[0][1],))

    def get(self, id: str) -> Job | None:
        return self._first("SELECT * FROM jobs WHERE id = ?", (id,)) if is_id(id) else None

    def page(
        self, kind: Kind, *, limit: int, order: Literal["asc", "desc"] = "desc", after: str | None = None
    ) -> tuple[list[Job], bool]:
        """Up to `limit` jobs behind the job `after`, which may be gone by now; and whether there are more."""
        if order not in ("asc", "desc"):
            raise InputError(f"order={order!r} is unknown.", hint="It is asc or desc.")
        low, high = f"{kind}_", f"{kind}_~"
        if after is not None:
            if not low < checked_id(after) < high:
                raise InputError(f"{after} is not the id of {kind}s.", hint=f"Theirs begin with {low}.")
            low, high = (after, high) if order == "asc" else (low, after)
        query = f"SELECT * FROM jobs WHERE id > ? AND id < ? ORDER BY id {order} LIMIT ?"
        jobs = self._all(query, (low, high, limit + 1))
        return jobs[:limit], len(jobs) > limit

    def active(self) -> list[Job]:
        """The jobs that have not ended, the oldest first."""
        return self._all(f"SELECT * FROM jobs WHERE {_ACTIVE} ORDER BY created, id")

    def expired(self, now: float) -> list[Job]:
        """The jobs whose time to be kept is over, the first to expire first."""
        return self._all("SELECT * FROM jobs WHERE expires <= ? ORDER BY expires, id", (now,))

    def counts(self) -> dict[Status, int]:
        counts = dict(self._database.rows("SELECT status, count(*) FROM jobs GROUP BY status"))
        return {status: counts.get(status, 0) for status in STATUSES}

    def queued(self) -> dict[str, int]:
        """By kind."""
        query = "SELECT substr(id, 1, instr(id, '_') - 1) kind, count(*) FROM jobs "
        return dict(self._database.rows(query + "WHERE status = 'queued' GROUP BY kind"))

    def begin(self, id: str) -> Job | None:
        """Ranks take the job. How long it waited for the first ones is its timing `queue`."""
        now = time.time()
        change = "status = 'in_progress', started = coalesce(started, :now), "
        change += "timings = json_set(timings, '$.queue', coalesce(started, :now) - created)"
        return self._move(id, change, "status = 'queued'", durable=False, now=now)

    def step(self, id: str, step: int, timings: Mapping[str, float]) -> Job | None:
        """`step` steps are done. One that was there before a loss is no progress and takes nothing back."""
        change = "attempts = iif(:step > step, 0, attempts), step = max(step, :step), "
        change += "timings = json_patch(timings, :timings)"
        values = {"step": step, "timings": _json(timings)}
        return self._move(id, change, "status = 'in_progress'", durable=False, **values)

    def lost(
        self, id: str, limit: int = 3, *, expires: float | None = None, blamed: bool = True
    ) -> Job | None:
        """The ranks of the job are gone: it waits again, or fails at `limit` losses without one new step.

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
        """The result is in the file `output`, which must be on the disk by now."""
        change = (
            "status = 'completed', completed = :now, output = :output, size = :size, expires = :expires, "
        )
        change += "attempts = 0, timings = json_patch(timings, :timings)"
        values = {"output": output, "size": size, "timings": _json(timings), "expires": expires}
        return self._move(id, change, "status = 'in_progress'", now=time.time(), **values)

    def fail(self, id: str, failure: Failure, *, expires: float | None = None) -> Job | None:
        """There will be no result: refused, out of memory, cancelled."""
        values = {"now": time.time(), "failure": _json(asdict(failure)), "expires": expires}
        return self._move(id, _FAILED, _ACTIVE, **values)

    def delete(self, id: str) -> Job | None:
        """The job as it was last; its idempotency key is free again."""
        if not is_id(id):
            return None
        query = "DELETE FROM jobs WHERE id = ? RETURNING *"
        return self._database.write(lambda: self._first(query, (id,)), durable=True)

    def _move(
        self, id: str, change: str, where: str, *, durable: bool = True, **values: object
    ) -> Job | None:
        return self._database.write(lambda: self._update(id, change, where, **values), durable=durable)

    def _update(self, id: str, change: str, where: str, **values: object) -> Job | None:
        query = f"UPDATE jobs SET {change} WHERE id = :id AND {where} RETURNING *"
        return self._first(query, {"id": id, **values})

    def _first(self, query: str, values: Any) -> Job | None:
        rows = self._database.rows(query, values)
        return _to_job(rows[0]) if rows else None

    def _all(self, query: str, values: tuple[object, ...] = ()) -> list[Job]:
        return [_to_job(row) for row in self._database.rows(query, values)]


def _to_row(job: Job) -> tuple[object, ...]:
    plain = job.to_json()
    plain |= {name: _json(plain[name]) for name in _JSON if plain[name] is not None}
    return tuple(plain.values())


def _to_job(row: tuple[Any, ...]) -> Job:
    plain = dict(zip(_FIELDS, row, strict=True))
    return Job.from_json(plain | {name: json.loads(plain[name] or "null") for name in _JSON})


def _json(plain: object) -> str:
    # In ASCII: a prompt may hold half of a surrogate pair, which SQLite's UTF-8 does not take.
    return json.dumps(plain, allow_nan=False)


def _bytes(key: str) -> bytes:
    return key.encode(errors="surrogatepass")
