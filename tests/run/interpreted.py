"""Checks of the Triton kernels in Triton's interpreter, which must be chosen before triton is imported.

One process runs all checks of a module and reports what failed; each check is a test of the module:

    def main() -> None: report(checks())
    failed = failures("tests.run.test_triton")      # name of a check: its traceback
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from weft.run.kernels.triton_attention import TritonAttention

ROOT = Path(__file__).parents[2]


class OneAtATime(TritonAttention):
    """The interpreter is not thread safe, and ranks are threads."""

    lock = threading.RLock()

    def attend(self, *given: Any, **options: Any) -> Any:
        with self.lock:
            return super().attend(*given, **options)

    def attend_backward(self, *given: Any) -> Any:
        with self.lock:
            return super().attend_backward(*given)


def report(checks: Mapping[str, Callable[[], None]]) -> None:
    """Run the checks whose names are the arguments of this process; print the tracebacks as JSON."""
    failed = {}
    for name in json.loads(sys.argv[1]):
        try:
            checks[name]()
        except Exception:
            failed[name] = traceback.format_exc()
    sys.stdout.write(json.dumps(failed))


def failures(module: str, names: list[str], timeout: float = 240) -> dict[str, str]:
    """Run checks of a module in the interpreter; return the traceback of each that failed."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", module, json.dumps(names)],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
