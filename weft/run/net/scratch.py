"""Scratch folders: private; removed at the end, or by a later process if their owner was killed."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from multiprocessing import util
from pathlib import Path
from typing import Any

PREFIX = "weft-"
NAME = re.compile(rf"{PREFIX}[a-z]+-[a-z0-9_]{{8}}")
LOCK = ".weft-scratch"
MAX_ROOT_BYTES = 66
"""A unix socket's path has at most 107 bytes: as many are left for the folder's name and the socket's."""


@contextmanager
def scratch(purpose: str) -> Generator[Path]:
    """Yield a new 0700 folder `weft-PURPOSE-…`, which is removed when the block ends."""
    folder, lock = make_scratch(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def make_scratch(purpose: str) -> tuple[Path, int]:
    """Return such a folder and a descriptor to close after removing it."""
    root = _root()
    _sweep(root)
    folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{purpose}-", dir=root))
    # The lock ends with this process, however it ends: a process that can take it may remove the folder. It
    # gets its name once it is held, so that no other process takes it before.
    lock = os.open(folder / f"{LOCK}.new", os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    (folder / f"{LOCK}.new").rename(folder / LOCK)
    return folder, lock


def use_for_multiprocessing() -> None:
    """Keep the socket of multiprocessing's fork server in such a folder, for the life of this process."""
    config: dict[str, Any] = vars(multiprocessing.current_process())["_config"]
    if config.get("tempdir") is None:
        folder, _ = make_scratch("fork")
        config["tempdir"] = str(folder)
        # As multiprocessing does for its own: after all users of the folder.
        util.Finalize(None, shutil.rmtree, args=(folder,), kwargs={"ignore_errors": True}, exitpriority=-100)


def _root() -> str:
    """Return the folder for temporary files, or /tmp where its path is too long for unix sockets."""
    usual = tempfile.gettempdir()
    return usual if len(os.fsencode(usual)) <= MAX_ROOT_BYTES else "/tmp"


def _sweep(root: str) -> None:
    """Remove folders of this user whose owner is gone."""
    for folder in Path(root).glob(f"{PREFIX}*"):
        if not NAME.fullmatch(folder.name):
            continue
        with suppress(OSError):
            status = folder.lstat()
            if status.st_uid != os.geteuid() or not folder.is_dir() or folder.is_symlink():
                continue
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError: in use
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
