"""Database: one SQLite file that one process owns, and its transactions, also on a full disk.

database = Database(folder / "jobs.db", setup)
database.write(lambda: database.execute("DELETE …"), durable=True)
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, TypeVar

from weft.core.errors import InputError
from weft.core.files import writing
from weft.serve.reserve import DiskFull, Reserve, is_full

LOG_PAGES = 100
"""Pages of 4 KiB after which the write-ahead log is copied to the database, so that it stays small."""
SERVER_FILES = ("jobs", "limits.json")
"""What a server keeps in its folder beside the database."""
Column = str | bytes | float | None
Values = Mapping[str, Column] | Sequence[Column]
T = TypeVar("T")
_log = logging.getLogger("weft.serve")


class Database:
    """One connection behind one lock: a transaction takes no longer than one sync of the disk.

    setup   called with this in the first transaction, to make the tables or to check them.
    """

    def __init__(self, path: Path, setup: Callable[[Database], None]) -> None:
        with writing(path.parent, hint="Serve from another folder."):
            _make_private(path)
        self.path = path
        self.lock = threading.RLock()  # a transaction may run queries of its own
        self._durable: bool | None = None
        try:
            self._connection = sqlite3.connect(
                path, timeout=0.5, isolation_level=None, check_same_thread=False
            )
            self.execute = self._connection.execute
            with ExitStack() as on_error:
                on_error.callback(self._connection.close)
                self._configure()  # from here on no other process can open it
                self.reserve = Reserve(path.with_name(f"{path.name}-reserve"))
                self.write(lambda: setup(self), durable=True)
                on_error.pop_all()
        except sqlite3.Error as error:
            taken = "locked" in str(error)
            raise InputError(
                f"{path} " + ("belongs to another process." if taken else f"cannot be read: {error}."),
                hint=("End the other server, or serve" if taken else "Serve") + " from another folder.",
            ) from error

    def _configure(self) -> None:
        # Exclusive: two servers on one folder would make every job twice. The lock ends with this process.
        self.execute("PRAGMA locking_mode = EXCLUSIVE")
        self.execute("PRAGMA journal_mode = WAL")
        self.execute("PRAGMA foreign_keys = ON")
        self.execute("PRAGMA temp_store = MEMORY")
        self.execute(f"PRAGMA wal_autocheckpoint = {LOG_PAGES}")

    def close(self) -> None:
        with self.lock:
            self._connection.close()

    def rows(self, query: str, values: Values = ()) -> list[Any]:
        # All rows are taken: a statement with RETURNING is only finished, and seen by COMMIT, at its end.
        with self.lock:
            return self.execute(query, values).fetchall()

    def write(self, change: Callable[[], T], *, durable: bool, spare: bool = True) -> T:
        """Run one transaction. On a full disk raise DiskFull; with `spare`, first retry in the reserve."""
        with self.lock:
            try:
                return self._transaction(change, durable=durable)
            except sqlite3.OperationalError as error:
                if not is_full(error):
                    raise
                self.reserve.release()
                if spare:
                    with suppress(sqlite3.OperationalError):  # the space of the log is room too
                        self.execute("PRAGMA wal_checkpoint(TRUNCATE)")
                    with suppress(sqlite3.OperationalError):
                        return self._transaction(change, durable=durable)
                raise DiskFull("The database has no room.", hint="Make room on the disk.") from error

    def _transaction(self, change: Callable[[], T], *, durable: bool) -> T:
        """Run a transaction. It is on the disk at its end, or unless `durable` after the next durable one."""
        with self._connection:
            if durable != self._durable:
                self.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
                self._durable = durable
            self.execute("BEGIN IMMEDIATE")
            return change()


def _make_private(path: Path) -> None:
    """Let only this user read the database, and its folder if that is the database's own."""
    folder = path.parent
    is_own = not folder.exists() or all(
        each.name in SERVER_FILES or each.name.startswith(path.name) for each in folder.iterdir()
    )
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if is_own and status.st_uid == os.geteuid():
        folder.chmod(0o700)
    elif status.st_mode & 0o077:
        about = {"folder": folder, "mode": f"{status.st_mode & 0o777:o}"}
        _log.warning("the folder of the jobs is open to other users; give one of its own", extra=about)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # SQLite gives its log the same mode
    for file in folder.glob(f"{path.name}*"):
        if file.stat().st_uid == os.geteuid():
            file.chmod(0o600)
