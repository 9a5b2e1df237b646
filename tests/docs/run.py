"""Execute blocks and commands as they are printed; what takes long only in `make soak`."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.docs.blocks import ROOT, SHELL, Block, needs
from tests.docs.parse import split
from tests.serve.fake import made, serving
from weft.cli import main as front
from weft.core.errors import MissingError
from weft.run.spawn.testbed import Testbed

LONG = re.compile(
    r"weft (bench|calibrate|demo|doctor|evaluate|generate|run|serve|testbed|train|verify)\b"
    r"|--devices|^torchrun|^python|^[A-Z_]+="
)
TESTED_ELSEWHERE = ("make", "pip", "source")
"""CI runs the targets, tests/docs/test_install.py the lines of pip."""
PORT = 8000
LIMIT = 3600
"""Seconds for one command."""


def run(block: Block, names: dict[str, Any], *, soak: bool = False) -> list[str]:
    """Execute a block that needs nothing and is not too long; return why some of it could not run."""
    if block.file:
        Path(block.file).write_text(block.text)
    if block.needs or (block.is_long and not soak):
        return []
    if block.language == "python":
        if obstacle := _obstacle(block.text):
            return [obstacle]
        with _server(block.text):
            exec(compile("\n" * (block.line - 1) + block.text, block.page, "exec"), names)
    elif block.language in SHELL:
        return [why for command in block.commands if (why := run_command(command, soak=soak))]
    return []


def run_command(command: str, *, soak: bool) -> str:
    """Execute a command; return the reason if this machine cannot."""
    if needs(command) or command.startswith(TESTED_ELSEWHERE) or (LONG.search(command) and not soak):
        return ""
    if obstacle := _obstacle(command):
        return obstacle
    if command.startswith("weft serve"):
        _serve(command)
    elif soak or not command.startswith("weft"):
        with _server(command):
            subprocess.run(["bash", "-c", command], env=_environment(), check=True, timeout=LIMIT)
    else:
        for words in split(command):
            with pytest.raises(SystemExit) as end:
                front.main(words[1:])
            assert not end.value.code, command
    return ""


def _environment() -> dict[str, str]:
    """This Python's commands, this tree before what is installed, and small defaults of pipelines."""
    path = [str(Path(__file__).parent / "small"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": ":".join(filter(None, path)),
        "XDG_STATE_HOME": str(Path.cwd() / "state"),
        "OMP_NUM_THREADS": "1",
    }


def _serve(command: str) -> None:
    """Start a server, wait until it answers, and end it."""
    process = subprocess.Popen(["bash", "-c", f"exec {command}"], env=_environment())
    try:
        while not _is_live():
            assert process.poll() is None, f"{command} ended with {process.returncode}"
            time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0, command
    finally:
        process.kill()


def _is_live() -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/live", timeout=5):
            return True
    except OSError:
        return False


@contextmanager
def _stand_in() -> Iterator[None]:
    with made(Path("served").absolute()) as engine, serving(engine, port=PORT):
        yield


def _server(text: str) -> Any:
    """A server without ranks where clients look for one."""
    return _stand_in() if f"127.0.0.1:{PORT}" in text else nullcontext()


def _obstacle(text: str) -> str:
    if re.search(r"weft serve|127\.0\.0\.1:8000", text):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", PORT))
            except OSError:
                return f"port {PORT} is taken"
    if re.search(r"weft testbed|Testbed\(", text):
        try:
            Testbed(1).close()
        except MissingError as error:
            return str(error)
    return ""
