"""Workers: processes that run functions of bench/ on the weft of this tree, or of commit BASE beside it."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from bench.against import ComparisonError, worktree
from bench.all import ROOT

BASE = "45b0107"
"""The last commit before programs were lowered: each message had a buffer of its own for the whole call."""


class TreeWorker:
    """A process that imports weft and bench from a tree and calls functions there, on one thread."""

    def __init__(self, root: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-c", "from bench.worker import serve; serve()"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen(words, cwd=root, env=environment, **pipes)

    def __enter__(self) -> TreeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def begin(self, function: str, *values: Any) -> None:
        """Start a call of `module:function`, whose values and result are plain JSON."""
        assert self._process.stdin
        print(json.dumps([function, values]), file=self._process.stdin, flush=True)

    def result(self) -> Any:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"A worker ended with status {self._process.wait()}; its error is above.")
        return json.loads(line)

    def call(self, function: str, *values: Any) -> Any:
        self.begin(function, *values)
        return self.result()


def serve() -> None:
    """Answer calls from standard input, on the descriptor of standard output, until it is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed must not be taken for an answer
    for line in sys.stdin:
        function, values = json.loads(line)
        module, _, name = function.partition(":")
        print(json.dumps(getattr(importlib.import_module(module), name)(*values)), file=answers, flush=True)


@contextmanager
def base_worker(root: Path = ROOT, commit: str = BASE) -> Iterator[TreeWorker | None]:
    """Yield a worker in a worktree of `commit` with this tree's bench/; None where git does not have it."""
    with ExitStack() as stack:
        worker = None
        with suppress(ComparisonError, OSError):  # not a clone, a shallow one, or no git
            tree = stack.enter_context(worktree(root, commit))
            shutil.copytree(ROOT / "bench", tree / "bench", dirs_exist_ok=True)
            worker = stack.enter_context(TreeWorker(tree))
        yield worker
