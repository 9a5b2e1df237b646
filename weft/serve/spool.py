"""Spool: what clients send, in memory while it is little and else in files, counted against the quota.

with await receive(request.stream(), disk.spool) as body:
    body.data                     # of a small body, else b""
    body.file                     # of a large one, else None
"""

from __future__ import annotations

import io
import os
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from weft.serve.reserve import DiskFull, is_full

MEMORY_BYTES = 128 * 2**10
"""Of a body that is not in a file; all that come at once take so much each."""
CHUNK = 2**16


class SpoolFile:
    """An upload on the disk; closed, it is gone unless `Disk.move` gave it to a job.

    claim   counts bytes that are written, or raises DiskFull; less than 0 when they are gone.
    """

    def __init__(self, path: Path, file: io.FileIO, claim: Callable[[int], None]) -> None:
        self.path, self.file, self.size, self._claim = path, file, 0, claim

    def write(self, data: bytes | bytearray) -> None:
        """Append; raises DiskFull where the quota or the disk has no room."""
        self.count(len(data))
        with _writing():
            left = memoryview(data)
            while left:
                left = left[self.file.write(left) or 0 :]

    def sync(self) -> None:
        """Make what was written durable, which may take long; `Disk.move` does not."""
        with _writing():
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


@contextmanager
def _writing() -> Generator[None]:
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise DiskFull("The disk has no room for an upload.", hint="Make room on it.") from error
        raise


@dataclass
class Body:
    """A body that was received: its bytes if it is small, else the file that they are in."""

    data: bytearray
    file: SpoolFile | None = None

    @property
    def is_large(self) -> bool:
        return self.file is not None

    def read(self) -> bytes:
        return bytes(self.data) if self.file is None else self.file.read()

    def pieces(self) -> Iterator[bytes]:
        """All of it, a little at a time."""
        if self.file is None:
            yield bytes(self.data)
            return
        self.file.file.seek(0)
        while piece := self.file.file.read(CHUNK):
            yield piece

    def __enter__(self) -> Body:
        return self

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()


async def receive(stream: AsyncIterator[bytes], spool: Callable[[], SpoolFile]) -> Body:
    """Read a body to its end; what is more than `MEMORY_BYTES` goes to a file while it comes."""
    body = Body(bytearray())
    try:
        async for chunk in stream:
            body.data += chunk
            if len(body.data) > MEMORY_BYTES:
                body.file = body.file or await run_in_threadpool(spool)
                await run_in_threadpool(body.file.write, body.data)
                body.data = bytearray()
        if body.file is not None:
            await run_in_threadpool(body.file.write, body.data)
            body.data = bytearray()
    except BaseException:
        body.__exit__()
        raise
    return body
