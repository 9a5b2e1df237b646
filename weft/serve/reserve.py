"""Reserve: disk space that only the database may use, so that a full disk can be emptied again.

    reserve = Reserve(folder / "jobs.db-reserve")
    reserve.release()      # a write failed for lack of space: retry it in the space of the file
    reserve.fits(size)     # whether a file may be written
    reserve.check()        # call it often, to notice a full disk before a write fails
    reserve.restore()      # take the space again, once there is enough

SQLite needs space to delete a row. The disk counts as full from the write that failed, or from less than
`MIN_FREE_BYTES` free beside the file, until the file is there and as much is free again.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
import threading
from pathlib import Path

from weft.core.errors import InputError
from weft.core.files import writing

RESERVE_BYTES = 512 * 2**10
"""At least the pages of a whole write-ahead log (`database.LOG_PAGES`): a checkpoint of it always fits."""
MIN_FREE_BYTES = 64 * 2**10
"""With less no job is taken, although its row would still fit: its result would not."""
_log = logging.getLogger("weft.serve")


class DiskFull(InputError):  # noqa: N818 - not a failure of the disk
    """The disk, or the quota, has no room for a write."""


def is_full(error: BaseException) -> bool:
    """Return whether the system refused a write for lack of space."""
    if isinstance(error, sqlite3.OperationalError):
        return "full" in str(error)
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


class Reserve:
    """A file of `size` bytes, there unless the database needs its space; any thread may call it."""

    def __init__(self, path: Path, size: int = RESERVE_BYTES) -> None:
        self._path, self._size = path, size
        self._lock = threading.Lock()
        self._is_low = False
        self._held = path.is_file() and path.stat().st_size == size
        with writing(path, hint="Serve from another folder."):
            self._held = self._held or self._take()
        if not self._held:
            self._warn()

    @property
    def is_full(self) -> bool:
        return not self._held or self._is_low

    def fits(self, size: int) -> bool:
        """Return whether a file of `size` bytes leaves the space of the reserve to the database."""
        return self._held or self._free() >= size + self._size

    def release(self) -> None:
        """Give the space to the database. Log once, however many writes fail until `restore`."""
        with self._lock:
            if self._held:
                self._path.unlink(missing_ok=True)
                if not self.is_full:
                    self._warn()
                self._held = False

    def check(self) -> bool:
        """Return whether the disk is full. From less than `MIN_FREE_BYTES` on it is, until `restore`."""
        with self._lock:
            if not self.is_full and self._free() < MIN_FREE_BYTES:
                self._is_low = True
                self._warn()
        return self.is_full

    def restore(self, needed: int = 0) -> None:
        """Take the space again once as much, and `needed` bytes, are free beside it, so as not to flap."""
        with self._lock:
            if not self.is_full:
                return
            wanted = self._size + needed + (0 if self._held else self._size)
            if self._free() >= wanted and (self._held or self._take()):
                self._held, self._is_low = True, False
                _log.warning("the disk has room again", extra={"free_bytes": self._free()})

    def _free(self) -> int:
        return shutil.disk_usage(self._path.parent).free

    def _warn(self) -> None:
        _log.warning("the disk is full", extra={"folder": self._path.parent, "free_bytes": self._free()})

    def _take(self) -> bool:
        try:
            self._path.unlink(missing_ok=True)
            handle = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(os.urandom(self._size))  # zeros could be stored as nothing
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            self._path.unlink(missing_ok=True)
            if is_full(error):
                return False
            raise
        return True
