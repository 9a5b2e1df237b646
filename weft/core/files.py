"""Files: written whole or not at all, what a disk refuses as a sentence, and where weft keeps things."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from weft.core.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_serial = count()


def cache() -> Path:
    """The folder of this user's for what can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}.") from None


@contextmanager
def whole(path: Path) -> Generator[Path]:
    """A name beside `path`, with its suffix, for a file that takes its place when it is complete."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{next(_serial)}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_place(path: Path, *, hint: str) -> None:
    """Before the work of which a file is to tell: whether there is a place for it."""
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {path.parent} for {path.name}.", hint=hint)
    if path.is_dir():
        raise InputError(f"{path} is a folder.", hint=hint)


@contextmanager
def writing(path: Path, *, hint: str) -> Generator[None]:
    """Where `path` is written, the system's reason not to becomes weft's."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.", hint=hint) from error
