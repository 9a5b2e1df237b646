"""Full disks for tests: a small tmpfs that is filled, or writes that fail as on one."""

from __future__ import annotations

import errno
import os
import sqlite3
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from weft.serve.job_store import JobStore

MIB = 2**20


@contextmanager
def mounted(folder: Path, size: int = 3 * MIB) -> Iterator[Path]:
    """A tmpfs of `size` bytes at `folder`; skips the test where this user may not mount one."""
    folder.mkdir(exist_ok=True)
    try:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no command mount")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


class Filler:
    """Fills the disk of `folder`, but for some bytes."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "filler"

    def fill(self, left: int = 0) -> None:
        with self.path.open("ab", buffering=0) as file:
            for size in (2**16, 2**12, 1):
                try:
                    while file.write(bytes(size)) == size:
                        pass
                except OSError as error:
                    assert error.errno == errno.ENOSPC
            file.truncate(max(0, file.tell() - left))

    def empty(self) -> None:
        self.path.unlink()


class Injected:
    """`is_full` makes every write to the store, and every file of a disk, fail as on a full disk.

    The reserve helps no more than on a disk that another program fills at once.
    """

    def __init__(self, store: JobStore, patch: pytest.MonkeyPatch) -> None:
        self.is_full, self.refused = False, 0
        database, fsync, replace = store._database, os.fsync, Path.replace
        execute = database.execute

        def executed(query: str, *values: Any) -> Any:
            if self.is_full and query.startswith("BEGIN"):
                self.refused += 1
                raise sqlite3.OperationalError("database or disk is full")
            return execute(query, *values)

        def written(*given: Any) -> Any:
            if self.is_full:
                self.refused += 1
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return (fsync if isinstance(given[0], int) else replace)(*given)

        patch.setattr(database, "execute", executed)
        patch.setattr("os.fsync", written)
        patch.setattr(Path, "replace", written)
