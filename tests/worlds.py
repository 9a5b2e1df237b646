"""The pools of ranks that all tests of a session share, started when first asked for.

def test_ranks_agree(worlds):
    assert len(set(worlds(3).run(fn))) == 1
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from weft.run.spawn.pool import Pool

SIZES = (2, 3, 4)  # of the worlds that tests of real ranks are parametrised by

_started: list[Pool] = []


@cache
def world(size: int) -> Pool:
    """`size` ranks with one thread each; a test that fails there does not poison the next."""
    pool = Pool(size, threads=1, timeout=20.0, limit=60.0)
    _started.append(pool)
    return pool


def running(pid: int) -> bool:
    """Whether there is such a process, of which more is left than its exit code."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status[0] != "Z"


def becomes_true(claim: Callable[[], bool], within: float = 30.0) -> bool:
    deadline = time.monotonic() + within
    while not claim() and time.monotonic() < deadline:
        time.sleep(0.02)
    return claim()


def close_worlds() -> None:
    while _started:
        _started.pop().close()
    world.cache_clear()
