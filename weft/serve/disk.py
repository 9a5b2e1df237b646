"""Disk: the files of jobs, in a folder for each, written atomically and within a quota.

    disk = Disk(folder, quota=10 << 30)
    disk.sweep(store.get)                                    # what a kill left behind
    disk.write(job.id, "video.mp4", data); disk.path(job.id, "video.mp4")
    disk.save_state([first.id, second.id], 7, data); disk.state(second.id).step

The state of a batch is one file, with its jobs and its step. It is moved into place, so that a kill leaves
this one or the one before, for all jobs of the batch alike.
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
"""Share of the quota for uploads that are under way."""


class OverQuota(DiskFull):
    """A file does not fit in the quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """State of a batch: its jobs in their order, the steps done, and all that the next step needs."""

    jobs: tuple[str, ...]
    step: int
    data: bytes


class Disk:
    """The files below `folder`, at most `quota` bytes. Any thread may call it, one per file.

    reserve   disk space that no file takes, if there is any.
    """

    def __init__(self, folder: Path, quota: int, reserve: Reserve | None = None) -> None:
        if quota < 1:
            raise InputError(f"quota must be >= 1 byte, got {quota}.")
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
            self._used = sum(map(_cleaned_size, [*self._folders(), self._states]))
        self._state_of = self._read_states()
        self._drop_unused(*self._states.iterdir())

    def of(self, id: str) -> Path:
        """Return the folder of a job, which is there once something was written to it."""
        return self._folder / checked_id(id)

    def path(self, id: str, name: str) -> Path:
        """Return the path of the file `name` of a job, always directly inside its folder."""
        if not _NAME.fullmatch(name):
            rule = "It must be short, of letters, digits, '_', '-' and '.', and not begin with '-' or '.'."
            raise InputError(f"{name[:80]!r} is not a valid file name.", hint=rule)
        return self.of(id) / name

    def used(self) -> int:
        """Return the bytes in all files, with those that are being written."""
        return self._used

    def write(self, id: str, name: str, data: bytes) -> Path:
        """Write a file durably; raise DiskFull if the quota or the disk has no room for it."""
        path = self.path(id, name)
        self.claim(len(data), name)
        try:
            with self._put(path, len(data)):
                old = _replace(path, data, durable=True)
        except BaseException:
            self.claim(-len(data))
            raise
        self.claim(-old)
        return path

    def move(self, id: str, name: str, upload: SpoolFile) -> None:
        """Make an upload, which is counted and synced already, the file `name` of a job."""
        path = self.path(id, name)
        with self._put(path, 0):
            upload.path.replace(path)
            _sync(path.parent)
        upload.file.close()
        with self._lock:
            self._spooled -= upload.size
        upload.size = 0  # the job's from now on

    def spool(self) -> SpoolFile:
        """Return a file for an upload. It counts against the quota, and is removed when it is closed."""
        with self._put(self._folder, 0):
            handle, name = tempfile.mkstemp(prefix=".upload.", dir=self._folder)
        return SpoolFile(Path(name), os.fdopen(handle, "w+b", buffering=0), self._claim_spooled)

    def _claim_spooled(self, size: int) -> None:
        """Count bytes of uploads, which must leave most of the quota to results."""
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
        """Count bytes that are added, if the quota has room for them, or (less than 0) that are removed."""
        with self._lock:
            if size > 0 and self._used + size > self.quota:
                full = f"{units.size(self._used)} of {units.size(self.quota)} are used"
                raise OverQuota(f"{name} needs {units.size(size)} but {full}.", hint=_MORE_ROOM)
            self._used += size

    @contextmanager
    def _put(self, path: Path, size: int) -> Generator[None]:
        """Prepare to put a file of `size` bytes; raise DiskFull if the disk has no room for it."""
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
        """Remove all files of a job atomically; do nothing if there are none.

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
        """Replace the state of a batch, even beyond the quota: states make the loss of ranks cheap.

        It is not synced. A machine that stops may cost a state, which its checksum shows, but no job.
        """
        path = self._states / checked_id(ids[0])
        about = {"jobs": [checked_id(id) for id in ids], "step": step, "checksum": zlib.crc32(data)}
        head = json.dumps(about).encode() + b"\n"
        with self._put(path, len(head) + len(data)):
            old = _replace(path, head, data, durable=False)
        with self._lock:
            self._used += len(head) + len(data) - old
            before = [self._state_of.get(id) for id in ids]
            self._state_of |= dict.fromkeys(ids, path)
        self._drop_unused(*before)

    def state(self, id: str) -> SavedState | None:
        """Return the last state of the batch of a job; None if it has to begin again."""
        path = self._state_of.get(id)
        state = _read_state(path) if path else None
        return state if state and id in state.jobs else None

    def drop_state(self, id: str) -> None:
        """Drop the state of a job; the file is removed with the last job of its batch."""
        with self._lock:
            path = self._state_of.pop(id, None)
        self._drop_unused(path)

    def sweep(self, job: Callable[[str], Job | None]) -> None:
        """Remove the files of jobs that are not in the store, and the states of those that have ended."""
        for folder in list(self._folders()):
            if job(folder.name) is None:
                self.remove(folder.name)
        for id in list(self._state_of):
            stored = job(id)
            if stored is None or not stored.active:
                self.drop_state(id)

    def _folders(self) -> Iterator[Path]:
        return (p for p in self._folder.iterdir() if is_id(p.name) and p.is_dir() and not p.is_symlink())

    def _read_states(self) -> dict[str, Path]:
        # A batch that lost a job continued under another name: of two states of a job the later step counts.
        states = [(state, path) for path in self._states.iterdir() if (state := _read_state(path))]
        states.sort(key=lambda pair: pair[0].step)
        return {id: path for state, path in states for id in state.jobs}

    def _drop_unused(self, *paths: Path | None) -> None:
        with self._lock:
            for path in {path for path in paths if path} - {*self._state_of.values()}:
                self._used -= _size(path)
                path.unlink(missing_ok=True)


def _read_state(path: Path) -> SavedState | None:
    """Return None for a file that is gone, or was torn when the machine stopped."""
    try:
        head, _, data = path.read_bytes().partition(b"\n")
        about = json.loads(head)
        state = SavedState(jobs=tuple(about["jobs"]), step=about["step"], data=data)
        return state if zlib.crc32(data) == about["checksum"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _replace(path: Path, *pieces: bytes, durable: bool) -> int:
    """Write a file atomically; return the bytes of the file that it replaces."""
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
    """Make the names in a folder durable, as fsync does for the data of a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _cleaned_size(folder: Path) -> int:
    """Return the bytes in a folder, after removing what a killed write left."""
    for left in folder.glob(".*"):
        left.unlink()
    return sum(map(_size, folder.iterdir()))
