"""Build a C library once, at first use, into a cache; raise if there is no compiler."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from weft.core.errors import MissingError
from weft.core.files import cache


@dataclass(frozen=True)
class Library:
    """C sources with compiler flags; errors say that `what` needs a compiler and `instead` does not."""

    name: str
    folder: Path
    units: tuple[tuple[str, tuple[str, ...]], ...]
    """(source file, flags); one source may be compiled several times, with different flags."""
    what: str
    instead: str

    def path(self) -> Path:
        """Return the shared library, built if it is not in the cache yet."""
        sources = b"".join(path.read_bytes() for path in sorted(self.folder.iterdir()))
        content = sources + repr((self.units, platform.machine())).encode()
        target = _cache_dir() / f"{self.name}-{hashlib.sha256(content).hexdigest()[:16]}.so"
        with _alone_in(target.parent):
            if not target.exists():
                self._build(target)
        return target

    def _build(self, target: Path) -> None:
        executable = compiler()
        if executable is None:
            hint = f"Install gcc (Debian: apt install gcc), or use {self.instead}."
            raise MissingError(f"{self.what} needs a C compiler, and none is here.", hint=hint)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            objects = [f"{i}.o" for i in range(len(self.units))]
            calls = [
                [executable, *flags, "-fPIC", "-c", str(self.folder / source), "-o", output]
                for (source, flags), output in zip(self.units, objects, strict=True)
            ]
            self._run_all(calls, folder)
            link = [executable, "-shared", *objects, "-o", "whole.so", "-lm", "-lpthread", "-ldl"]
            self._run_all([link], folder)
            # Renamed when complete: an interrupted build leaves nothing that could be loaded.
            Path(folder, "whole.so").replace(target)

    def _run_all(self, calls: list[list[str]], folder: str) -> None:
        running = [
            subprocess.Popen(call, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for call in calls
        ]
        outputs = [process.communicate()[0] for process in running]
        for process, output in zip(running, outputs, strict=True):
            if process.returncode:
                message = f"{self.what} does not build here: {output.strip()[:400]}"
                raise MissingError(message, hint=f"Use {self.instead}.")


def compiler() -> str | None:
    """Return the path of the C compiler."""
    return next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)


@contextmanager
def _alone_in(folder: Path) -> Generator[None, None, None]:
    """Lock a folder: ranks that start together need one build, not one each."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _cache_dir() -> Path:
    """Return a folder that only the user can write, since its libraries are loaded and run."""
    folder = cache()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="weft-"))
