"""A rank that dies or stops in the middle: the others raise in time, by name, and nothing is left."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft
from tests.distributed.jobs import works
from tests.worlds import becomes_true, running
from weft.run.spawn.pool import CallFailure, Pool, RankFailure

VICTIM, OTHERS = 2, (0, 1, 3)
TIMEOUT = 3.0
SLACK = 5.0  # that the issue grants on top of the time-out


def attend_on_and_on(plan: str, started: str) -> None:
    """Forward and backward for a minute; a file says that it is under way."""
    inputs = [torch.randn(1, 4, 64, 16, requires_grad=True) for _ in range(3)]
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        weft.attention(*inputs, plan=plan, tokens=256, timeout=TIMEOUT).sum().backward()
        Path(started, str(dist.get_rank())).touch()


def attend_unless(absent: int, plan: str) -> None:
    if dist.get_rank() == absent:
        time.sleep(TIMEOUT + SLACK)
    else:
        attend_on_and_on(plan, "/nowhere")


@pytest.fixture
def pool() -> Iterator[Pool]:
    # The process group would wait for a minute: it is weft's own time-out that ends the waiting.
    with Pool(4, timeout=60.0, limit=90.0) as pool:
        assert pool.run(works) == [True] * 4
        yield pool


def struck(
    pool: Pool, plan: str, directory: Path, blow: signal.Signals
) -> tuple[dict[int, CallFailure], float]:
    """What became of the ranks after one was hit in the middle, and when it was, in the run's seconds."""
    began = time.monotonic()
    pool.start(attend_on_and_on, plan, str(directory))
    assert becomes_true(lambda: len(list(directory.iterdir())) == 4, within=30.0)
    at = time.monotonic() - began
    os.kill(pool.pids[VICTIM], blow)
    with pytest.raises(RankFailure) as caught:
        pool.finish()
    return caught.value.failures, at


@pytest.mark.parametrize("plan", ["ulysses", "ring"])
def test_a_rank_killed_mid_attention_makes_the_others_raise_in_time(
    pool: Pool, plan: str, tmp_path: Path
) -> None:
    pids = pool.pids
    found, at = struck(pool, plan, tmp_path, signal.SIGKILL)
    assert found[VICTIM].message == "was killed by SIGKILL"
    assert {found[rank].kind for rank in OTHERS} == {"CommError"}
    assert all(found[rank].seconds - at < TIMEOUT + SLACK for rank in OTHERS)
    assert all(names_operation_and_peer(found[rank].message, rank) for rank in OTHERS)
    assert any(f"rank {VICTIM}" in found[rank].message for rank in OTHERS)
    assert not any(running(pid) for pid in pids)


def test_a_rank_stopped_mid_attention_makes_the_others_raise_in_time(pool: Pool, tmp_path: Path) -> None:
    pids = pool.pids
    pool.timeout = TIMEOUT  # a stopped rank never answers: do not wait for it much longer than for the others
    found, at = struck(pool, "ring", tmp_path, signal.SIGSTOP)
    assert found[VICTIM].kind == "stuck"
    assert {found[rank].kind for rank in OTHERS} == {"CommError"}
    assert all(found[rank].seconds - at < TIMEOUT + SLACK for rank in OTHERS)
    assert all(names_operation_and_peer(found[rank].message, rank) for rank in OTHERS)
    assert any(f"from rank {VICTIM}" in found[rank].message for rank in OTHERS)
    assert not any(running(pid) for pid in pids)


def test_a_rank_that_never_comes_is_missed_in_time(pool: Pool) -> None:
    with pytest.raises(RankFailure) as caught:
        pool.run(attend_unless, VICTIM, "ring")
    found = caught.value.failures
    assert {rank: found[rank].kind for rank in OTHERS} == dict.fromkeys(OTHERS, "CommError")
    assert all(found[rank].seconds < TIMEOUT + SLACK for rank in OTHERS)
    assert all("waited for all 4 ranks to agree on a plan" in found[rank].message for rank in OTHERS)


def names_operation_and_peer(message: str, rank: int) -> bool:
    """As in: Rank 0 waited 3.0 s for op 2 (hop 1) from rank 3: …"""
    return message.startswith(f"Rank {rank} ") and " op " in message and message.count("rank") >= 1
