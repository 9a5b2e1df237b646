"""Spool: uploads in files that count against the quota."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from pathlib import Path


class SpoolFile:
    """An upload on the disk; closing it removes it, unless `Disk.move` gave it to a job.

    claim   counts bytes that are written, or raises DiskFull; less than 0 when they are removed.
    """

    def __init__(self, path: Path, file: io.FileIO, claim: Callable[[int], None]) -> None:
        self.path, self.file, self.size, self._claim = path, file, 0, claim

    def write(self, data: bytes) -> None:
        """Append; raises DiskFull where the quota has no room, and OSError where the disk has none."""
        self.count(len(data))
        left = memoryview(data)
        while left:
            left = left[self.file.write(left) or 0 :]

    def sync(self) -> None:
        """Make what was written durable, which may take long; `Disk.move` does not."""
        os.fsync(self.file.fileno())

    def count(self, size: int) -> None:
        """Count bytes; another process may have written them."""
        self._claim(size)
        self.size += size

    def read(self) -> bytes:
        self.file.seek(0)
        return self.file.read()

    def close(self) -> None:
        self.file.close()
        self.path.unlink(missing_ok=True)
        self._claim(-self.size)
        self.size = 0

    def __enter__(self) -> SpoolFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
