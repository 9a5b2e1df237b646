"""A server over the fake engine: in a thread, or as the process that `weft serve` is."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn

from tests.serve.fake import Fake
from weft.serve.api.app import create_app
from weft.serve.api.limits import RequestLimits
from weft.serve.api.server import address, bind

ROOT = Path(__file__).parents[2]
# The engine is the fake one; all else is what users run.
PROCESS = """
import os, sys
import weft.serve.engine as module, weft.serve.api.server as host
from tests.serve.fake import Fake

class Engine(Fake):
    def __init__(self, settings):
        super().__init__(settings.folder, pace=float(os.environ.get("PACE", "0.01")), limit=settings.queue)
        self.state = os.environ.get("STATE", "ok")
        self.name = settings.name
        self.trouble = "There is no such GPU." if self.state == "failed" else ""

module.Engine = Engine
host.HEAD_SECONDS = float(os.environ.get("HEAD", "10"))
host.serve.__kwdefaults__["grace"] = float(os.environ.get("GRACE", "20"))
from weft.cli.main import main
main(sys.argv[1:])
"""


@contextmanager
def in_thread(engine: Fake) -> Iterator[str]:
    """The address of a server that lasts as long as the block."""
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(create_app(engine, limits=RequestLimits()), log_config=None, access_log=False)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
    engine.start()
    thread.start()
    try:
        yield address(listener)
    finally:
        server.should_exit = True
        thread.join()
        engine.close()
        listener.close()


class Process:
    """`weft serve` with these words."""

    def __init__(self, words: Sequence[str], **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROCESS, "serve", "--port", "0", *words], cwd=ROOT, text=True,
            env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self.pid = self.process.pid

    def url(self) -> str:
        """From the line that says it is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise AssertionError(self.ended())
        return next(word for word in line.split() if word.startswith("http://"))

    def ended(self, seconds: float = 20.0) -> tuple[int, str]:
        """The exit code and what it wrote to stderr."""
        _, said = self.process.communicate(timeout=seconds)
        return self.process.returncode, said

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


def until(true: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "It did not come true."
        time.sleep(0.02)
