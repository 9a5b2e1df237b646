"""However a pool or its parent ends, nothing of it is left: no process, no file."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.worlds import becomes_true, running
from weft.run.spawn.pool import Pool

# Ranks that both wait in gloo for a message that never comes.
BLOCKED = """
import os, time
from weft.run.spawn.pool import Pool
pool = Pool(2, timeout=60.0)
pool.start(exec, "import torch, torch.distributed as d; d.recv(torch.ones(1), 1 - d.get_rank())")
time.sleep(0.3)
{first}
print(*pool.pids, flush=True)
{then}
"""
FORK = "if os.fork() == 0: time.sleep(30); os._exit(0)"
STARTING = """
import time
from weft.run.spawn.pool import Pool
print(flush=True)
pool = Pool(2)
time.sleep(60)
"""


class Script:
    """A parent in a session and a temporary directory of its own."""

    def __init__(self, code: str) -> None:
        self.directory = tempfile.TemporaryDirectory(prefix="weft-test-")
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(root), "TMPDIR": self.directory.name},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        self.ranks = [int(pid) for pid in self.process.stdout.readline().split()]

    def __enter__(self) -> Script:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.alive():
            os.kill(pid, signal.SIGKILL)
        self.process.communicate()
        self.directory.cleanup()

    def alive(self) -> list[int]:
        pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return [pid for pid in pids if running(pid) and session_of(pid) == self.process.pid]

    def files(self) -> list[Path]:
        return list(Path(self.directory.name).glob("weft-pool-*"))

    def errors(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()


def session_of(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return 0


@pytest.mark.parametrize("busy", ["idle", "busy"])
def test_nothing_is_left_after_close(busy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pool = Pool(2)
    pids = pool.pids
    assert all(running(pid) for pid in pids)
    assert list(tmp_path.glob("weft-pool-*"))
    if busy == "busy":
        pool.start(time.sleep, 100.0)
    pool.close()
    pool.close()
    assert not any(running(pid) for pid in pids)
    assert not list(tmp_path.glob("weft-pool-*"))


def test_nothing_is_left_when_the_body_raises() -> None:
    with pytest.raises(KeyError), Pool(2) as pool:
        pids = pool.pids
        pool.start(time.sleep, 100.0)
        raise KeyError
    assert not any(running(pid) for pid in pids)


def test_nothing_is_left_of_a_pool_that_is_dropped() -> None:
    pool = Pool(2)
    pids = pool.pids
    del pool
    gc.collect()
    assert not any(running(pid) for pid in pids)


@pytest.mark.parametrize("then", ["raise SystemExit(3)", "os._exit(3)"])
def test_nothing_is_left_of_a_parent_that_ends_without_close(then: str) -> None:
    with Script(BLOCKED.format(first="", then=then)) as script:
        assert script.process.wait(30.0) == 3
        assert becomes_true(lambda: not script.alive() and not script.files())
        assert script.errors() == ""


def test_nothing_is_left_of_a_parent_that_is_killed() -> None:
    with Script(BLOCKED.format(first="", then="time.sleep(60)")) as script:
        script.process.kill()
        assert becomes_true(lambda: not script.alive() and not script.files())


def test_ranks_end_with_a_killed_parent_even_if_its_children_live_on() -> None:
    with Script(BLOCKED.format(first=FORK, then="time.sleep(60)")) as script:
        assert all(running(pid) for pid in script.ranks)
        script.process.kill()
        assert becomes_true(lambda: not any(running(pid) for pid in script.ranks))
        assert script.alive()


@pytest.mark.parametrize(
    "code",
    [BLOCKED.format(first="", then="pool.finish()"), STARTING],
    ids=["running", "starting"],
)
def test_ctrl_c_gives_one_traceback_and_leaves_nothing(code: str) -> None:
    with Script(code) as script:
        time.sleep(0.3)  # in which the forkserver begins to import torch
        os.killpg(script.process.pid, signal.SIGINT)
        script.process.wait(30.0)
        assert becomes_true(lambda: not script.alive() and not script.files())
        errors = script.errors()
    assert errors.count("Traceback") == 1
    assert errors.endswith("KeyboardInterrupt\n")
