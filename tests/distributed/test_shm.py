"""Real ranks over shared memory: every strategy is exact, and a rank may be killed at any moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft
from tests.cases import names
from tests.distributed.jobs import Answer, Worlds, attend, check, problem, tiles_with_empty_rows
from tests.run.dense import Truth
from tests.worlds import SIZES, becomes_true, running
from weft.run.comm.onesided import OneSidedComm
from weft.run.spawn.pool import Pool, RankFailure
from weft.run.world import world_of

MASK = tiles_with_empty_rows(5, 53, 53, 8)
OWN = 47.0  # a time-out that no other test has: the world of these is made here
TIMEOUT, SLACK, RANKS = 3.0, 5.0, 3
PLANS = ("ulysses", "ring", "gather")


def in_shared_memory(truth: Truth, plans: tuple[str, ...]) -> tuple[list[Answer], str, int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WEFT_TRANSPORT", "shm")
        comm = world_of(None, OWN).comm
    assert isinstance(comm, OneSidedComm)
    found = [attend(truth, {"plan": plan, "mask": truth.mask, "timeout": OWN}) for plan in plans]
    return found, comm.reason, comm.base.bytes_sent


@pytest.mark.parametrize("size", SIZES)
def test_every_strategy_is_exact_over_shared_memory(worlds: Worlds, size: int) -> None:
    truth = Truth.of(problem(size, 53, heads=5), MASK)
    answers, reasons, by_group = zip(*worlds(size).run(in_shared_memory, truth, names(size)), strict=True)
    assert set(reasons) == {""}
    assert set(by_group) == {0}
    for one in zip(*answers, strict=True):
        check(truth, list(one), 5e-6)


def attend_once() -> None:
    x = torch.randn(1, 3, 32, 8)
    weft.attention(x, x, x, tokens=32 * RANKS)


def attend_on_and_on(plan: str, started: str) -> None:
    inputs = [torch.randn(1, 3, 32, 8, requires_grad=True) for _ in range(3)]
    until = time.monotonic() + 60.0
    while time.monotonic() < until:
        weft.attention(*inputs, plan=plan, tokens=32 * RANKS, timeout=TIMEOUT).sum().backward()
        Path(started, str(dist.get_rank())).touch()


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(RANKS, timeout=60.0, limit=90.0, transport="shm") as pool:
        yield pool


def kill(pool: Pool, directory: Path, chance: random.Random) -> None:
    """One rank of a pool at work, at a random moment: all others raise in time, and nothing is left."""
    victim = chance.randrange(RANKS)
    pool.run(attend_once)  # fresh ranks import and build at their own pace, not within the time-out
    began = time.monotonic()
    pool.start(attend_on_and_on, chance.choice(PLANS), str(directory))
    pids = pool.pids
    assert becomes_true(lambda: len(list(directory.iterdir())) == RANKS, within=40.0)
    time.sleep(chance.random() * 0.02)
    os.kill(pids[victim], signal.SIGKILL)
    at = time.monotonic() - began
    with pytest.raises(RankFailure) as caught:
        pool.finish()
    found = caught.value.failures
    assert found[victim].message == "was killed by SIGKILL"
    for rank in set(range(RANKS)) - {victim}:
        assert found[rank].kind == "CommError", found[rank]
        assert found[rank].message.startswith(f"Rank {rank} waited")
        assert " op " in found[rank].message
        assert found[rank].seconds - at < TIMEOUT + SLACK
    assert any(f"rank {victim}: its process has ended" in one.message for one in found.values())
    assert not any(running(pid) for pid in pids)
    assert left_behind() == []


def kills(pool: Pool, tmp_path: Path, count: int, seed: int) -> None:
    chance = random.Random(seed)
    for number in range(count):
        directory = tmp_path / str(number)
        directory.mkdir()
        kill(pool, directory, chance)


def test_a_rank_killed_at_a_random_moment_makes_the_others_raise_in_time(pool: Pool, tmp_path: Path) -> None:
    kills(pool, tmp_path, 10, seed=6)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_kills(pool: Pool, tmp_path: Path) -> None:
    kills(pool, tmp_path, 200, seed=int(time.time()))


def left_behind() -> list[str]:
    return [path.name for path in Path("/dev/shm").iterdir() if "weft" in path.name]


def segments_of(pids: tuple[int, ...]) -> int:
    """Memory files that processes have open."""
    links: list[Any] = []
    for pid in pids:
        links += [path.readlink() for path in Path(f"/proc/{pid}/fd").iterdir()]
    return sum("memfd:weft" in str(link) for link in links)


def test_memory_has_no_name_and_goes_with_its_ranks(pool: Pool) -> None:
    pool.run(attend_once)
    pids = pool.pids
    assert segments_of(pids) >= RANKS
    assert left_behind() == []
    pool.close()
    assert becomes_true(lambda: not any(running(pid) for pid in pids), within=10.0)
