"""Run a user script as one rank, and write its traceback to a file that the launcher shows."""

from __future__ import annotations

import io
import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from weft.run.spawn.signals import end_with_parent


def main() -> None:
    """Run the script sys.argv[1], or after -m a module, as Python would with the rest of sys.argv."""
    end_with_parent(signal.SIGTERM)  # elsewhere than on Linux ranks notice by their peers
    if os.environ.get("WEFT_LAUNCHER", str(os.getppid())) != str(os.getppid()):
        sys.exit("The launcher ended before this rank began.")
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
        stack = _from_script_on(error.__traceback__, script)
        _report("".join(traceback.format_exception(type(error), error, stack)))
        sys.exit(1)


def _report(stack: str) -> None:
    """Write the file that the launcher reads, in torch's format but in nanoseconds.

    A peer may fail in the same second.
    """
    now = time.time_ns()
    info = {"timestamp": str(now // 10**9), "nanoseconds": str(now)}
    if stack:
        info["py_callstack"] = stack
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        # Atomically: the launcher may end this rank in the middle of it, and reads what is there.
        Path(f"{path}.new").write_text(json.dumps({"message": {"message": "", "extraInfo": info}}))
        Path(f"{path}.new").replace(path)


def _from_script_on(stack: TracebackType | None, script: str) -> TracebackType | None:
    """Return the traceback without the frames that start the script."""
    frame = stack
    while frame is not None and frame.tb_frame.f_code.co_filename != script:
        frame = frame.tb_next
    return frame or stack


def _write_whole_lines() -> None:
    """Write each line in one call, also with PYTHONUNBUFFERED: ranks share the launcher's output."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


if __name__ == "__main__":
    main()
