"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

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
