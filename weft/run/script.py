"""What `weft.run.launch` starts as each rank: a script that leaves its traceback to the launcher to show."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

PARENT_DEATH_SIGNAL = 1  # prctl


def main() -> None:
    """Run the script sys.argv[1], or after -m a module, as Python would with the rest of sys.argv."""
    _end_with_parent()
    _write_whole_lines()
    is_module = sys.argv[1] == "-m"
    sys.argv[:] = sys.argv[1 + is_module :]
    script = sys.argv[0]
    try:
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(script).resolve().parent)
            runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    except SystemExit as error:
        if error.code not in (None, 0):
            _report(error.code if isinstance(error.code, str) else "")
        raise SystemExit(1 if isinstance(error.code, str) else error.code) from None
    except BaseException as error:
        own = _own(error.__traceback__, script)
        _report("".join(traceback.format_exception(type(error), error, own)))
        sys.exit(1)


def _report(stack: str) -> None:
    """Write the file that the launcher reads, in torch's format but with a finer time.

    A peer may fail in the same second.
    """
    now = time.time_ns()
    about = {"timestamp": str(now // 10**9), "nanoseconds": str(now)}
    report = {"message": {"message": "", "extraInfo": about | ({"py_callstack": stack} if stack else {})}}
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # Whole or not at all: the launcher may end this rank in the middle of it, and reads what is there.
        Path(f"{path}.new").write_text(json.dumps(report))
        Path(f"{path}.new").replace(path)


def _own(stack: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback from the script on: how it was started is nobody's question."""
    found = stack
    while found is not None and found.tb_frame.f_code.co_filename != script:
        found = found.tb_next
    return found or stack


def _write_whole_lines() -> None:
    """Write each line in one call, also with PYTHONUNBUFFERED: ranks share the launcher's output."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def _end_with_parent() -> None:
    """A launcher that is killed leaves no ranks behind (Linux; elsewhere they find out by their peers)."""
    import ctypes

    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
    if os.environ.get("WEFT_LAUNCHER", str(os.getppid())) != str(os.getppid()):
        sys.exit("The launcher ended before this rank began.")


if __name__ == "__main__":
    main()
