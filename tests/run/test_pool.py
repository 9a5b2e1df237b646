"""What a pool returns, and what it says when ranks fail."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import weft.run.spawn.pool_rank
from tests.worlds import SIZES, becomes_true, running
from weft.core.errors import CommError, InputError
from weft.run.spawn.pool import Pool, RankFailure

Worlds = Callable[[int], Pool]


class UnpicklableError(Exception):
    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} is not {right}")


def rank_and(*args: int) -> tuple[int, ...]:
    return (dist.get_rank(), *args)


def rank_with_the_last_one_first(x: int) -> tuple[int, int]:
    time.sleep(0.05 * (dist.get_world_size() - dist.get_rank()))
    return dist.get_rank(), x


def place_on_host() -> tuple[str, str]:
    return os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]


def sum_of_ranks() -> float:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return total.item()


def threads_here_and_in_the_forkserver() -> tuple[int, int]:
    return torch.get_num_threads(), len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))


def fail_on(ranks: tuple[int, ...], error: Exception) -> None:
    if dist.get_rank() in ranks:
        raise error


def fail_on_then_barrier(ranks: tuple[int, ...], error: Exception) -> None:
    fail_on(ranks, error)
    dist.barrier()


def fail_unpicklably() -> None:
    raise UnpicklableError(1, 2)


def nap_then_barrier(seconds: float) -> None:
    time.sleep(seconds)
    dist.barrier()


def exit_on(rank: int, code: int) -> None:
    if dist.get_rank() == rank:
        os._exit(code)
    dist.barrier()


def stop_forkserver_and_die(seconds: float) -> None:
    """Kill rank 1 while the forkserver, which sends its exit status, is stopped for `seconds`."""
    if dist.get_rank() == 1:
        os.kill(os.getppid(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        dist.barrier()  # raises once rank 1 is dead
    finally:
        time.sleep(seconds)
        os.kill(os.getppid(), signal.SIGCONT)


def close_pipe_and_live_on(rank: int) -> None:
    if dist.get_rank() != rank:
        return
    os._exit = time.sleep  # type: ignore[assignment] # the thread that reads the pipe ends the process
    frame: Any = sys._getframe()
    while "pipe" not in frame.f_locals:
        frame = frame.f_back
    with socket.socket(fileno=os.dup(frame.f_locals["pipe"].fileno())) as pipe:
        pipe.shutdown(socket.SHUT_RDWR)
    time.sleep(100.0)


def refuse_and_expect_barrier_timeout(seconds: float) -> None:
    def check(timeout: float) -> None:
        assert timeout == seconds

    weft.run.spawn.pool_rank.barrier = check
    raise InputError("no.")


def ones(count: int) -> torch.Tensor:
    return torch.full((count,), float(dist.get_rank()), requires_grad=True)


def mean_of(x: torch.Tensor) -> float:
    return x.mean().item()


def a_generator() -> Iterator[int]:
    yield 1


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool(3, limit=60.0) as pool:
        yield pool


def test_results_are_ordered_by_rank(worlds: Worlds) -> None:
    results = worlds(3).run(rank_with_the_last_one_first, 7)
    assert results == [(0, 7), (1, 7), (2, 7)]


def test_ranks_know_their_place_on_the_host(worlds: Worlds) -> None:
    """By which each of them finds its GPU."""
    assert worlds(3).run(place_on_host) == [(str(rank), "3") for rank in range(3)]


def test_per_rank_arguments_follow_the_shared_ones(worlds: Worlds) -> None:
    results = worlds(3).run(rank_and, 7, per_rank=[(1,), (2,), (3, 4)])
    assert results == [(0, 7, 1), (1, 7, 2), (2, 7, 3, 4)]


@pytest.mark.parametrize("size", SIZES)
def test_collectives_reach_every_rank(worlds: Worlds, size: int) -> None:
    assert worlds(size).run(sum_of_ranks) == [size * (size - 1) / 2] * size


def test_a_pool_of_one_has_a_process_group_too() -> None:
    with Pool(1) as pool:
        assert pool.run(sum_of_ranks) == [0.0]


def test_ranks_have_the_threads_asked_for_and_the_forkserver_has_one() -> None:
    with Pool(2, threads=2) as pool:
        assert pool.run(threads_here_and_in_the_forkserver) == [(2, 1), (2, 1)]


def test_large_tensors_travel_both_ways(worlds: Worlds) -> None:
    count = 4 * 1024 * 1024
    results = worlds(2).run(ones, count)
    assert [mean_of(x) for x in results] == [0.0, 1.0]
    assert worlds(2).run(mean_of, results[1].detach()) == [1.0, 1.0]


def test_a_failure_names_its_rank_and_carries_its_exception(pool: Pool) -> None:
    with pytest.raises(RankFailure, match=r"1 of 3 ranks.*\n  rank 1: KeyError: 'blue'") as caught:
        pool.run(fail_on, (1,), KeyError("blue"))
    failure = caught.value.failures[1]
    assert isinstance(caught.value, CommError)
    assert list(caught.value.failures) == [1]
    assert isinstance(failure.error, KeyError)
    assert "in fail_on" in failure.traceback
    assert 0.0 < failure.seconds < 60.0


def test_an_exception_that_cannot_be_pickled_is_told_all_the_same(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="rank 2: UnpicklableError: 1 is not 2") as caught:
        pool.run(fail_unpicklably)
    assert caught.value.failures[2].error is None


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="rank 0: TypeError: cannot pickle 'generator'"):
        pool.run(a_generator)


def test_a_failure_survives_pickling(pool: Pool) -> None:
    with pytest.raises(RankFailure) as caught:
        pool.run(fail_on, (1,), InputError("no.", hint="yes."))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert str(copy.failures[1].error) == "no. yes."


def test_ranks_that_all_refuse_are_kept(pool: Pool) -> None:
    before = pool.pids
    with pytest.raises(RankFailure, match="3 of 3 ranks failed"):
        pool.run(fail_on, (0, 1, 2), InputError("no."))
    assert pool.pids == before
    assert pool.run(sum_of_ranks) == [3.0] * 3


def test_ranks_that_all_refuse_have_the_timeout_of_the_pool_to_synchronize(pool: Pool) -> None:
    before = pool.pids
    with pytest.raises(RankFailure, match="3 of 3 ranks failed"):
        pool.run(refuse_and_expect_barrier_timeout, pool.timeout)
    assert pool.pids == before


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2)])
def test_any_other_failure_ends_the_ranks_and_the_next_run_has_fresh_ones(
    pool: Pool, ranks: tuple[int, ...]
) -> None:
    before = pool.pids
    with pytest.raises(RankFailure):
        pool.run(fail_on, ranks, ValueError("left something in the air"))
    assert not any(running(pid) for pid in before)
    assert pool.run(sum_of_ranks) == [3.0] * 3
    assert not set(pool.pids) & set(before)


def test_a_rank_that_raises_alone_leaves_the_others_their_time_out() -> None:
    with Pool(3, timeout=2.0) as pool:
        pool.run(rank_and)  # imports this module, which may take longer than the time-out
        with pytest.raises(RankFailure, match="failed:\n  rank 1: KeyError") as caught:
            pool.run(fail_on_then_barrier, (1,), KeyError("blue"))
    failures = caught.value.failures
    assert {failures[rank].kind for rank in (0, 2)} == {"RuntimeError"}
    assert failures[0].seconds - failures[1].seconds > 1.5


def test_a_rank_that_exits_is_named_with_its_code_and_the_others_raise(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="rank 1 exited with code 3") as caught:
        pool.run(exit_on, 1, 3)
    assert {caught.value.failures[rank].kind for rank in (0, 2)} == {"RuntimeError"}


def test_a_killed_rank_is_named_first_and_the_others_raise_by_themselves(pool: Pool) -> None:
    pool.start(nap_then_barrier, 0.5)
    os.kill(pool.pids[2], signal.SIGKILL)
    with pytest.raises(RankFailure, match="failed:\n  rank 2 was killed by SIGKILL") as caught:
        pool.finish()
    assert list(caught.value.failures)[0] == 2
    assert caught.value.failures[2].seconds < caught.value.failures[0].seconds
    assert {caught.value.failures[rank].kind for rank in (0, 1)} == {"RuntimeError"}


def test_killed_rank_is_reported_as_killed_if_its_exit_status_arrives_late(pool: Pool) -> None:
    with pytest.raises(RankFailure, match="failed:\n  rank 1 was killed by SIGKILL"):
        pool.run(stop_forkserver_and_die, 2.5)


def test_killed_rank_precedes_peers_that_have_answered_by_then(pool: Pool) -> None:
    pool.start(nap_then_barrier, 0.5)
    os.kill(pool.pids[2], signal.SIGKILL)
    assert pool._ranks is not None
    assert all(pipe.poll(30.0) for pipe in pool._ranks._pipes)
    with pytest.raises(RankFailure, match="failed:\n  rank 2 was killed by SIGKILL"):
        pool.finish()


def test_rank_that_closes_its_pipe_and_lives_on_is_reported(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(rank_and)  # imports this module, which may take longer than the time-out
    monkeypatch.setattr("weft.run.spawn.pool.REPLY_SECONDS", 0.5)
    pool.timeout = 0.0
    with pytest.raises(RankFailure, match="rank 1 closed its pipe"):
        pool.run(close_pipe_and_live_on, 1)


def test_a_rank_killed_between_runs_is_named_by_the_next(pool: Pool) -> None:
    pid = pool.pids[0]
    os.kill(pid, signal.SIGSEGV)
    assert becomes_true(lambda: not Path(f"/proc/{pid}").exists())
    with pytest.raises(RankFailure, match="rank 0 was killed by SIGSEGV"):
        pool.run(sum_of_ranks)


def test_a_run_over_its_limit_says_where_each_rank_is() -> None:
    with Pool(2) as pool:
        pool.run(rank_and)  # imports this module, which may take longer than the limit
        pool.limit = 0.3
        pids = pool.pids
        with pytest.raises(RankFailure, match=r"rank 1 was still in nap_then_barrier \(test_pool"):
            pool.run(nap_then_barrier, 100.0)
        assert not any(running(pid) for pid in pids)


def test_a_stopped_rank_does_not_stop_the_pool() -> None:
    with Pool(2, limit=0.3) as pool:
        pids = pool.pids
        pool.start(nap_then_barrier, 100.0)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(RankFailure, match="rank 1 gave no sign of life"):
            pool.finish()
        assert not any(running(pid) for pid in pids)


def test_ctrl_c_ends_the_run_and_not_the_pool(pool: Pool) -> None:
    pids = pool.pids
    pool.start(time.sleep, 100.0)
    threading.Timer(0.2, signal.pthread_kill, [threading.get_ident(), signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        pool.finish()
    assert not any(running(pid) for pid in pids)
    assert pool.run(sum_of_ranks) == [3.0] * 3


def test_what_cannot_run_is_refused_before_anything_is_sent(pool: Pool) -> None:
    with pytest.raises(InputError, match="top of a module"):
        pool.run(lambda: None)
    with pytest.raises(InputError, match="2 entries for 3 ranks"):
        pool.run(rank_and, per_rank=[(), ()])
    with pytest.raises(InputError, match="start"):
        pool.finish()
    pool.start(rank_and)
    with pytest.raises(InputError, match="finish"):
        pool.start(rank_and)
    assert pool.finish() == [(0,), (1,), (2,)]
    pool.close()
    with pytest.raises(InputError, match="closed"):
        pool.run(rank_and)
