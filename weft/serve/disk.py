"""The files of the jobs: a folder for each, files that are whole or not there, and a quota.

    disk = Disk(folder, quota=10 << 30)
    disk.sweep(store.get)                                    # what a kill left behind
    disk.write(job.id, "video.mp4", data); disk.path(job.id, "video.mp4")
    disk.save_state([first.id, second.id], 7, data); disk.state(second.id).step

The state of a batch is one file, which says whose it is and how far. It is moved into place, so a kill at any
moment leaves it or the one before, for all jobs of the batch alike.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from weft.core import units
from weft.core.errors import InputError
from weft.core.files import whole, writing
from weft.serve.jobs import Job, checked_id, is_id
from weft.serve.reserve import DiskFull, Reserve, is_full
from weft.serve.spool import SpoolFile

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_MORE_ROOM = "Delete some jobs, wait until some expire, or serve with a larger quota."
SPOOL_SHARE = 0.25
"""Of the quota, for uploads that are under way."""


class OverQuota(DiskFull):
    """A file that does not fit in the quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """How far a batch is: its jobs in their order, the steps done, and all that the next one needs."""

    jobs: tuple[str, ...]
    step: int
    data: bytes


class Disk:
    """The files below `folder`, at most `quota` bytes; any thread may call it, one per file.

    reserve   disk space that no file takes, if there is one.
    """

    def __init__(self, folder: Path, quota: int, reserve: Reserve | None = None) -> None:
        if quota < 1:
            raise InputError(f"quota={quota} leaves no room for a result.", hint="It is in bytes, 1 or more.")
        self.quota, self._reserve, self._spooled = quota, reserve, 0
        self._folder, self._states = folder, folder / "states"
        self._lock = threading.Lock()
        self._removed = count()
        with writing(folder, hint="Serve from another folder."):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._states.mkdir(mode=0o700, exist_ok=True)
            for gone in folder.glob(".gone.*"):
                shutil.rmtree(gone, ignore_errors=True)
            for upload in folder.glob(".upload.*"):
                upload.unlink()
            self._used = sum(map(_tidied, [*self._folders(), self._states]))
        self._state_of = self._found_states()
        self._drop_unused(*self._states.iterdir())

    def of(self, id: str) -> Path:
        """The folder of a job; there once something was written to it."""
        return self._folder / checked_id(id)

    def path(self, id: str, name: str) -> Path:
        """Where the file `name` of a job is, always right inside its folder."""
        if not _NAME.fullmatch(name):
            rule = (
                "A name has letters, digits, '_', '-' and '.', does not begin with '-' or '.', and is short."
            )
            raise InputError(f"{name[:80]!r} cannot be the name of a file.", hint=rule)
        return self.of(id) / name

    def used(self) -> int:
        """Bytes in all files, with those that are being written."""
        return self._used

    def write(self, id: str, name: str, data: bytes) -> Path:
        """On the disk when it returns; raises DiskFull where the quota does not allow it."""
        path = self.path(id, name)
        self.claim(len(data), name)
        try:
            with self._putting(path, len(data)):
                old = _replace(path, data, durable=True)
        except BaseException:
            self.claim(-len(data))
            raise
        self.claim(-old)
        return path

    def move(self, id: str, name: str, upload: SpoolFile) -> None:
        """Make an upload the file `name` of a job; it is counted and synced already."""
        path = self.path(id, name)
        with self._putting(path, 0):
            upload.path.replace(path)
            _sync(path.parent)
        upload.file.close()
        with self._lock:
            self._spooled -= upload.size
        upload.size = 0  # the job's from now on

    def spool(self) -> SpoolFile:
        """A file for an upload, which counts as a job's do; it is removed when it is closed."""
        with self._putting(self._folder, 0):
            handle, name = tempfile.mkstemp(prefix=".upload.", dir=self._folder)
        return SpoolFile(Path(name), os.fdopen(handle, "w+b", buffering=0), self._claim_spooled)

    def _claim_spooled(self, size: int) -> None:
        """Uploads that are under way leave most of the quota to results."""
        with self._lock:
            if size > 0 and self._spooled + size > self.quota * SPOOL_SHARE:
                raise OverQuota("Too many uploads are under way.", hint="Send it again later.")
            self._spooled += size
        try:
            self.claim(size)
        except OverQuota:
            with self._lock:
                self._spooled -= size
            raise

    def claim(self, size: int, name: str = "It") -> None:
        """Count bytes that come, unless the quota has no room for them, or (less than 0) that are gone."""
        with self._lock:
            if size > 0 and self._used + size > self.quota:
                full = f"{units.size(self._used)} of {units.size(self.quota)} are used"
                raise OverQuota(f"{name} needs {units.size(size)} but {full}.", hint=_MORE_ROOM)
            self._used += size

    @contextmanager
    def _putting(self, path: Path, size: int) -> Generator[None]:
        """Where a file of `size` bytes is put; raises DiskFull where the disk has no room for it."""
        if self._reserve is not None and not self._reserve.fits(size):
            raise DiskFull(f"{path.name} needs {units.size(size)}; the disk is full.", hint=_MORE_ROOM)
        try:
            with writing(path, hint=_MORE_ROOM):
                if path.parent != self._states and not path.parent.is_dir():
                    path.parent.mkdir(mode=0o700, exist_ok=True)
                    _sync(self._folder)
                yield
        except InputError as error:
            if is_full(error.__cause__ or error):
                raise DiskFull(error.message, hint=_MORE_ROOM) from error
            raise

    def read(self, id: str, name: str) -> bytes:
        return self.path(id, name).read_bytes()

    def remove(self, id: str) -> None:
        """All files of a job, at once for whoever looks; nothing if there are none.

        Delete the job before: a kill in between then leaves files for `sweep`, not a job without them.
        """
        self.drop_state(id)
        gone = self._folder / f".gone.{next(self._removed)}"
        try:
            self.of(id).rename(gone)
        except FileNotFoundError:
            return
        except OSError as error:  # a name takes room too
            if not is_full(error):
                raise
            gone = self.of(id)
        self.claim(-sum(file.stat().st_size for file in gone.iterdir() if file.name[0] != "."))
        shutil.rmtree(gone, ignore_errors=True)

    def save_state(self, ids: Sequence[str], step: int, data: bytes) -> None:
        """Takes the place of the state before it, whatever the quota: it is what makes a loss cheap.

        Not synced either: a machine that stops may cost a state, whose checksum then tells, but no job.
        """
        path = self._states / checked_id(ids[0])
        about = {"jobs": [checked_id(id) for id in ids], "step": step, "checksum": zlib.crc32(data)}
        head = json.dumps(about).encode() + b"\n"
        with self._putting(path, len(head) + len(data)):
            old = _replace(path, head, data, durable=False)
        with self._lock:
            self._used += len(head) + len(data) - old
            before = [self._state_of.get(id) for id in ids]
            self._state_of |= dict.fromkeys(ids, path)
        self._drop_unused(*before)

    def state(self, id: str) -> State | None:
        """The last state of the batch that the job is in; None if it has to begin again."""
        path = self._state_of.get(id)
        state = _read_state(path) if path else None
        return state if state and id in state.jobs else None

    def drop_state(self, id: str) -> None:
        """The job needs no state any more; the file goes with the last job of its batch."""
        with self._lock:
            path = self._state_of.pop(id, None)
        self._drop_unused(path)

    def sweep(self, job: Callable[[str], Job | None]) -> None:
        """Removes the files of jobs that are not in the store, and the states of those that have ended."""
        for folder in list(self._folders()):
            if job(folder.name) is None:
                self.remove(folder.name)
        for id in list(self._state_of):
            found = job(id)
            if found is None or not found.active:
                self.drop_state(id)

    def _folders(self) -> Iterator[Path]:
        return (p for p in self._folder.iterdir() if is_id(p.name) and p.is_dir() and not p.is_symlink())

    def _found_states(self) -> dict[str, Path]:
        # A batch that lost a job went on under another name: of two states of a job the later step counts.
        found = [(state, path) for path in self._states.iterdir() if (state := _read_state(path))]
        found.sort(key=lambda pair: pair[0].step)
        return {id: path for state, path in found for id in state.jobs}

    def _drop_unused(self, *paths: Path | None) -> None:
        with self._lock:
            for path in {path for path in paths if path} - {*self._state_of.values()}:
                self._used -= _size(path)
                path.unlink(missing_ok=True)


def _read_state(path: Path) -> State | None:
    """None for a file that is gone or was torn when the machine stopped."""
    try:
        head, _, data = path.read_bytes().partition(b"\n")
        about = json.loads(head)
        state = State(jobs=tuple(about["jobs"]), step=about["step"], data=data)
        return state if zlib.crc32(data) == about["checksum"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _replace(path: Path, *pieces: bytes, durable: bool) -> int:
    """Puts a whole file at `path`; the bytes of the one it replaces."""
    with whole(path) as temporary:
        with temporary.open("wb") as file:
            file.writelines(pieces)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        old = _size(path)
    if durable:
        _sync(path.parent)
    return old


def _sync(folder: Path) -> None:
    """Makes the names in a folder durable, as fsync does for what is in a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tidied(folder: Path) -> int:
    """The bytes in a folder, without what a killed write left."""
    for left in folder.glob(".*"):
        left.unlink()
    return sum(map(_size, folder.iterdir()))
