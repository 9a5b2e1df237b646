"""Files: atomic writes, checked reads in bounded memory, errors as sentences, and the cache folder.

Reading a file from any source returns its value or raises an InputError.
"""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, cast

from weft.core.errors import InputError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MAX_BYTES = 64 << 20
"""Of a file that is read at once."""
MAX_DEPTH = 64
"""Of nested lists and objects: readers of JSON may recurse."""

_serial = count()


def cache() -> Path:
    """Return the user's cache folder of weft."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "weft"


def read_bytes(path: Path, *, limit: int = MAX_BYTES) -> bytes:
    """Read a regular file of at most `limit` bytes; a pipe or a device could block or never end."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path} is not a regular file.")
        with path.open("rb") as stream:
            size = os.fstat(stream.fileno()).st_size  # the open file's: the path may name another now
            data = stream.read(min(limit, size) + 1)  # allocates that much
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
    if len(data) > limit:
        raise InputError(f"{path} must have at most {limit:,} bytes.", hint="Pass the file that weft wrote.")
    return data


def toml(path: Path) -> dict[str, Any]:
    data = read_bytes(path)
    try:
        return tomllib.loads(data.decode("utf-8"))
    except RecursionError:
        raise InputError(f"{path} is not TOML: it is nested too deeply.") from None
    except ValueError as error:  # TOMLDecodeError and UnicodeDecodeError too
        raise InputError(f"{path} is not TOML: {error}.") from None


def read_json(path: Path, *, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Read a file that holds one JSON object."""
    value = parse_json(read_bytes(path, limit=limit), str(path))
    if not isinstance(value, dict):
        raise InputError(f"{path} holds a {type(value).__name__}; an object is required.")
    return cast("dict[str, Any]", value)


def parse_json(data: bytes | str, source: str) -> Any:
    """Parse JSON that may be hostile; the message of an InputError begins with `source`."""
    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_unique)
        if re.search(r"\\u[dD]", text):  # a lone surrogate cannot be encoded
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise InputError(f"{source} is not JSON: it is nested too deeply.") from None
    except ValueError as error:  # JSONDecodeError, UnicodeError, and whole numbers of too many digits
        raise InputError(f"{source} is not JSON: {str(error)[:200]}.") from None
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for each in level for child in _children(each)]
        if not level:
            return value
    raise InputError(f"{source} is nested more than {MAX_DEPTH} deep.")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        ((name, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"duplicate key {name[:80]!r}")
    return table


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("list[Any]", value) if isinstance(value, list) else ()


@contextmanager
def whole(path: Path) -> Generator[Path]:
    """Yield a temporary name beside `path`, with its suffix; the file replaces `path` when it is complete."""
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.{next(_serial)}{path.suffix}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_writable(path: Path, *, hint: str) -> None:
    """Check before long work that a file can be written at `path`."""
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {path.parent} for {path.name}.", hint=hint)
    if path.is_dir():
        raise InputError(f"{path} is a folder.", hint=hint)


@contextmanager
def writing(path: Path, *, hint: str) -> Generator[None]:
    """Raise the system's errors while `path` is written as an InputError."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror or error}.", hint=hint) from error
