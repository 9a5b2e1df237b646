"""Files that are written whole or not at all, and what a disk refuses as a sentence."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from weft.core.errors import InputError

_serial = count()


@contextmanager
def whole(path: Path) -> Generator[Path]:
    """A name beside `path`, with its suffix, for a file that takes its place when it is complete."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{next(_serial)}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def writing(path: Path, *, hint: str) -> Generator[None]:
    """Where `path` is written, the system's reason not to becomes weft's."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.", hint=hint) from error
