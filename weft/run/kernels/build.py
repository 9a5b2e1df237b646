"""Build the C kernel once, at first use, into a cache; a missing compiler is an error that says so."""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from weft.core.errors import MissingError

SOURCES = Path(__file__).parent / "csrc"
# Strict IEEE order except for contraction: -ffast-math would undo the rounding trick of 2^x.
FLAGS = ["-O3", "-ffp-contract=fast", "-fno-math-errno", "-fPIC", "-std=gnu11"]
# Lanes of one vector, and the flags that allow them, by instruction set.
ISAS = {
    "avx512": ["-DW=16", "-mavx512f", "-mavx2", "-mfma"],
    "avx2": ["-DW=8", "-mavx2", "-mfma"],
    "base": ["-DW=4"],
}


def compiler() -> str | None:
    """The C compiler that would be used."""
    return next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)


@cache
def library_path() -> Path:
    """The shared library, built if it is not in the cache yet."""
    sources = sorted(SOURCES.iterdir())
    content = (
        b"".join(path.read_bytes() for path in sources) + repr((FLAGS, ISAS, platform.machine())).encode()
    )
    target = _cache_dir() / f"attend-{hashlib.sha256(content).hexdigest()[:16]}.so"
    with _alone_in(target.parent):
        if not target.exists():
            _build(target)
    return target


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One process at a time: ranks that start together need one build, not one each."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _cache_dir() -> Path:
    """A folder of the user's own, since what lies in it is loaded and run."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "weft"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="weft-"))


def _build(target: Path) -> None:
    found = compiler()
    if found is None:
        raise MissingError(
            "The compiled CPU kernel needs a C compiler, and none is here.",
            hint="Install gcc (Debian: apt install gcc), or use impl='sdpa'.",
        )
    isas = ISAS if platform.machine() in ("x86_64", "AMD64") else {"base": ISAS["base"]}
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        jobs = [(["-O2"], SOURCES / "dispatch.c", "dispatch.o")]
        for isa, flags in isas.items():
            for name in ("forward", "backward"):
                jobs.append(([*FLAGS, *flags, f"-DISA={isa}"], SOURCES / f"{name}.c", f"{name}-{isa}.o"))
        calls = [[found, *flags, "-fPIC", "-c", str(source), "-o", output] for flags, source, output in jobs]
        _run_all(calls, folder)
        objects = [output for _, _, output in jobs]
        _run_all([[found, "-shared", *objects, "-o", "attend.so", "-lm", "-lpthread", "-ldl"]], folder)
        # Renamed when it is whole: a build that is cut off leaves nothing that could be loaded.
        Path(folder, "attend.so").replace(target)


def _run_all(calls: list[list[str]], folder: str) -> None:
    running = [
        subprocess.Popen(call, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for call in calls
    ]
    outputs = [process.communicate()[0] for process in running]
    for process, output in zip(running, outputs, strict=True):
        if process.returncode:
            raise MissingError(
                f"The compiled CPU kernel does not build here: {output.strip()[:400]}",
                hint="Use impl='sdpa'.",
            )
