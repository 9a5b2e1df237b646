"""The watcher over NCCL's stand-in: the same rank is named on all ranks, and nothing waits on the host."""

from __future__ import annotations

import _thread
import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.fake_nccl import World, fake_nccl, nccl_ranks, run_nccl, until
from tests.run.dense import Truth
from weft.core.errors import CommError
from weft.core.layout import Layout
from weft.core.mask import BlockMask
from weft.core.problem import Problem
from weft.plan.choose import build
from weft.run import streams
from weft.run.comm.group import GroupComm
from weft.run.comm.rollcall import RankProgress, find_late_rank
from weft.run.comm.watcher import MAX_POLL_SECONDS, Operation, Watcher
from weft.run.execute import Executor
from weft.run.kernels import choose

CPU = torch.device("cpu")
TIMEOUT = 60.0
STEP = MAX_POLL_SECONDS
PLANS = ("ring", "zigzag", "ulysses", "gather", "usp:2x2", "ring+balanced")


def problem(tokens: int = 37, ranks: int = 4) -> Problem:
    layout = Layout.even(tokens, ranks)
    return Problem(batch=1, heads=4, kv_heads=4, head_dim=4, q=layout, kv=layout, dtype="float64")


def swap(comm: GroupComm, label: str = "op 0 (swap)", *, ranks: tuple[int, ...] = ()) -> Any:
    """Each rank of some, or all, sends to each other one."""
    peers = [peer for peer in ranks or range(comm.size) if peer != comm.rank]
    sends, receives = ([(peer, torch.zeros(4, dtype=torch.uint8)) for peer in peers] for _ in range(2))
    return comm.post(sends, receives, label, 0)


class Stand:
    """A work or an event that ends when it is told to."""

    done = False

    def is_completed(self) -> bool:
        return self.done

    def query(self) -> bool:
        return self.done

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: streams.Event) -> float:
        del end_event
        return 0.0


@pytest.fixture
def caller() -> Iterator[int]:
    """A thread that has made a call, and is interrupted."""
    over = threading.Event()

    def wait() -> None:
        with suppress(CommError):
            while not over.wait(0.01):
                pass

    thread = threading.Thread(target=wait)
    thread.start()
    yield thread.ident or 0
    over.set()
    thread.join()


# Nothing on the hot path waits on the host


@pytest.mark.parametrize("plan", PLANS)
def test_attention_over_nccl_is_right_and_never_waits_on_the_host(plan: str) -> None:
    truth = Truth.of(problem())
    schedule = build(plan, problem(), BlockMask.dense(4, 37))

    def job(comm: GroupComm) -> tuple[Tensor, tuple[Tensor, ...]]:
        executor = Executor(schedule, comm, choose("exact"))
        inputs = truth.inputs(comm.rank)
        comm.warm_up(torch.device("meta"))
        out, saved = executor.forward(*inputs, truth.scale, keep=True)
        return out, executor.backward(truth.slope(comm.rank), inputs, out, saved, truth.scale)

    results, world = run_nccl(4, job)
    assert truth.output_error([out for out, _ in results]) < 1e-10
    assert truth.gradient_error([grads for _, grads in results]) < 1e-8
    assert world.host_waits == 0 and all(member.posts > 1 for member in world.members)


def test_a_wait_with_a_time_out_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(transit: Any) -> None:
        for work in transit._works:
            work.wait(1.0)

    monkeypatch.setattr("weft.run.comm.group.StreamExchange.finish", careless)
    assert run_nccl(2, lambda comm: swap(comm).finish())[1].host_waits == 2


# All ranks raise, and name the same one


def messages(run: Any, *, without: frozenset[int] = frozenset()) -> set[str]:
    """Tick until all watchers have failed; what the ranks raised, and that it was in time."""
    while any(w.failure is None for r, w in enumerate(run.watchers) if r not in without):
        run.tick(step=STEP, without=without)
        assert run.now <= run.timeout + 1.0, "the ranks do not end"
    assert run.now >= run.timeout
    errors = [error for rank, error in enumerate(run.errors()) if rank not in without]
    assert all(isinstance(error, CommError) for error in errors), errors
    return {str(error) for error in errors}


def posted(run: Any, counts: list[int]) -> None:
    until(lambda: [member.posts for member in run.world.members] == counts)


def test_a_rank_that_does_not_call_is_named_on_all_ranks() -> None:
    come = threading.Event()

    def job(comm: GroupComm) -> None:
        swap(comm, "op 0 (first)").finish()
        if comm.rank == 2:
            come.wait(60.0)
        swap(comm, "op 1 (hop 1)").finish()

    with nccl_ranks(4, job) as run:
        posted(run, [2, 2, 1, 2])
        while run.watchers[2].failure is None:
            run.tick(step=STEP)
        come.set()  # its next call raises at once
        (message,) = messages(run)
    assert message.startswith("Rank 2 is late: ranks 0, 1 and 3 waited 60.")
    assert (
        "in op 1 (hop 1), and it has not called it; the last operation that it called is op 0 (first)."
        in message
    )


def test_a_work_that_never_ends_is_ended_on_all_ranks() -> None:
    """All ranks have called it, and compute in Python or wait in a synchronize when the time is over."""

    def job(comm: GroupComm) -> None:
        transit = swap(comm, "op 5 (hop 2)")
        if comm.rank == 1:
            while True:
                sum(range(100))
        transit.finish()

    with nccl_ranks(4, job, is_stuck=True) as run:
        posted(run, [1] * 4)
        (message,) = messages(run)
    assert re.match(
        r"A message of rank \d does not arrive: ranks 0, 1, 2 and 3 waited 60.\d s in op 5", message
    )


def test_garbage_of_an_aborted_kernel_is_never_used() -> None:
    used: list[int] = []

    def job(comm: GroupComm) -> None:
        swap(comm).finish()
        used.append(comm.rank)

    with nccl_ranks(3, job, is_stuck=True) as run:
        posted(run, [1] * 3)
        messages(run)
    assert used == []


def test_a_device_that_is_busy_is_told_from_a_host_that_does_not_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    busy = Stand()
    plain = streams.record
    monkeypatch.setattr(
        streams, "record", lambda device: busy if threading.current_thread() in slow else plain(device)
    )
    slow: list[threading.Thread] = []

    def job(comm: GroupComm) -> None:
        if comm.rank == 1:
            slow.append(threading.current_thread())
        swap(comm).finish()

    with nccl_ranks(3, job, is_stuck=True) as run:
        posted(run, [1] * 3)
        (message,) = messages(run)
    assert message.startswith("Rank 1 is late") and "its device has not come to it yet" in message


def test_a_rank_that_died_is_named() -> None:
    def job(comm: GroupComm) -> None:
        if comm.rank != 3:
            swap(comm).finish()

    with nccl_ranks(4, job) as run:
        posted(run, [1, 1, 1, 0])
        (message,) = messages(run, without=frozenset({3}))
    assert message.startswith("Rank 3 did not answer a roll call, and ranks 0, 1 and 2 waited 60.")


def test_a_rank_that_has_nothing_to_do_with_it_is_not_blamed_and_learns_of_it() -> None:
    """Plans give ranks different numbers of messages; rank 0 has none, and its next call raises."""
    over = threading.Event()

    def job(comm: GroupComm) -> None:
        if comm.rank == 0:
            over.wait(60.0)
        elif comm.rank == 3:
            return
        swap(comm, ranks=(1, 2, 3) if comm.rank else ()).finish()

    with nccl_ranks(4, job) as run:
        posted(run, [0, 1, 1, 0])
        while run.watchers[0].failure is None:
            run.tick(step=STEP)
        over.set()
        assert [type(error).__name__ for error in run.errors()] == ["LateRankError"] * 3 + ["NoneType"]
        assert "Rank 3 is late: ranks 1 and 2 waited" in str(run.errors()[0])


def test_a_rank_that_comes_before_the_time_is_over_is_no_error() -> None:
    come = threading.Event()

    def job(comm: GroupComm) -> list[int]:
        for label in ("op 0", "op 1"):
            if comm.rank == 0:
                come.wait(60.0)
                come.clear()
            swap(comm, label).finish()
        return [comm.rank]

    with nccl_ranks(3, job) as run:
        for turn in range(2):  # a roll that was called does not count for the next time
            posted(run, [turn, turn + 1, turn + 1])
            for _ in range(220):
                run.tick(step=STEP)
            come.set()
            posted(run, [turn + 1] * 3 if turn else [turn + 1, turn + 2, turn + 2])
        assert [future.result(60.0) for future in run.futures] == [[0], [1], [2]]
        assert all(watcher.failure is None for watcher in run.watchers)


def test_two_groups_fail_apart() -> None:
    with nccl_ranks(2, lambda comm: swap(comm).finish()) as good:
        assert good.errors() == [None, None]
        with nccl_ranks(2, lambda comm: None if comm.rank else swap(comm).finish()) as bad:
            posted(bad, [1, 0])
            while any(watcher.failure is None for watcher in bad.watchers):
                bad.tick(step=STEP)
                good.tick(step=STEP)
            assert "Rank 1 is late" in str(bad.errors()[0])
        assert [watcher.failure for watcher in good.watchers] == [None, None]
        with fake_nccl(threads=False):
            swaps = [swap(comm) for comm in good.comms]
            for transit in swaps:
                transit.finish()


def test_a_group_that_failed_raises_the_same_at_each_call() -> None:
    with nccl_ranks(2, lambda comm: None if comm.rank else swap(comm).finish()) as run:
        posted(run, [1, 0])
        while any(watcher.failure is None for watcher in run.watchers):
            run.tick(step=STEP)
        first = str(run.errors()[0])
        for call in (
            swap,
            lambda comm: comm.begin(CPU),
            lambda comm: comm.all_gather_ints([1]),
            lambda comm: comm.warm_up(torch.device("meta")),
            lambda comm: comm.all_to_all([(0, torch.zeros(1))], [(0, torch.zeros(1))], "all"),
        ):
            for comm in run.comms:
                with pytest.raises(CommError) as raised:
                    call(comm)
                assert str(raised.value) == first
        assert str(pickle.loads(pickle.dumps(raised.value))) == first


def test_a_lost_store_names_who_serves_it(caller: int) -> None:
    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("Connection reset by peer\n at TCPStore.cpp")

    aborted: list[int] = []
    watcher = Watcher(cast("Any", Gone()), 1, [4, 5], lambda: aborted.append(1))
    watcher.timeout = 8.0
    watcher.tick(0.0)
    assert watcher.failure is None  # nobody waits for anything
    watcher._posted.append(Operation([Stand()], streams.record(CPU), "op 0", [("send", 0)], 8.0, caller))
    watcher.tick(1.0)
    watcher.tick(10.0)
    with pytest.raises(CommError, match=r"Rank 5 waited 9.0 s in op 0.*rank 0, is lost \(Connection reset"):
        watcher.check()
    assert aborted


def test_what_autograd_posts_ends_the_main_thread() -> None:
    """A backward runs in a thread of autograd, and an optimizer in the main thread must not use it."""
    watcher = Watcher(dist.HashStore(), 0, [0, 1], lambda: None)
    watcher.timeout = 8.0
    over = threading.Event()

    def backward() -> None:
        watcher.watch([Stand()], streams.record(CPU), "op 0", [("send", 1)], 8.0)
        with suppress(CommError):
            over.wait(60.0)

    _thread.start_new_thread(backward, ())
    until(lambda: len(watcher._posted) == 1)
    ticks = threading.Thread(target=lambda: [watcher.tick(now) for now in (0.0, 5.0, 9.0)])
    with pytest.raises(CommError, match="Rank 1 did not answer"):
        ticks.start()
        for _ in range(4000):
            threading.Event().wait(0.005)
    over.set()
    ticks.join()


def test_time_counts_from_when_the_stream_came_to_it(caller: int) -> None:
    """A host may be far ahead of its device: what is queued is not late."""
    world = World(2)
    with fake_nccl(threads=False):
        watcher = GroupComm(world.members[0], 8.0).watcher  # pyright: ignore[reportArgumentType]
    works, events = [Stand(), Stand()], [Stand(), Stand()]
    for work, event in zip(works, events, strict=True):
        watcher._posted.append(Operation([work], event, "op", [("send", 1)], 8.0, caller))
    watcher.tick(0.0)
    watcher.tick(100.0)
    assert world.store.get("weft watcher/roll") == b"0"
    events[0].done = events[1].done = True
    watcher.tick(101.0)
    watcher.tick(105.5)
    assert world.store.get("weft watcher/roll") == b"1"
    works[0].done = True
    watcher.tick(106.0)  # the second one begins when the first one has ended
    watcher.tick(113.0)
    assert watcher.failure is None
    watcher.tick(114.1)
    assert watcher.failure is not None


def test_works_of_a_graph_are_not_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "is_capturing", lambda _: True)

    def job(comm: GroupComm) -> int:
        swap(comm).finish()
        return len(comm.watcher._posted)

    assert run_nccl(2, job)[0] == [0, 0]


def test_ranks_connect_before_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "is_capturing", lambda _: True)
    with pytest.raises(CommError, match="captured before the ranks have connected. Run the call once"):
        run_nccl(2, lambda comm: comm.warm_up(torch.device("meta")))


def test_a_watcher_has_a_thread_of_its_own_that_ends() -> None:
    """As on a real group; the time-out is short, and how long it takes is not looked at."""
    with nccl_ranks(3, lambda comm: comm.rank == 1 or swap(comm).finish(), timeout=0.4, threads=True) as run:
        errors = run.errors()
        assert {str(error).split(":")[0] for error in errors if error} == {"Rank 1 is late"}
        assert sum(error is not None for error in errors) == 2
        until(lambda: all(watcher.failure is not None for watcher in run.watchers))
    assert not [thread for thread in threading.enumerate() if thread.name == "weft-watcher"]


# Who is late, by what the ranks answer

NAMES = [4, 5, 6]  # what the world calls the ranks of this group


def test_the_first_of_a_chain_is_late_and_not_those_who_wait_themselves() -> None:
    """Rank 0 waits for 1, which waits for 2, which computes."""
    answers = [
        RankProgress(1, {"receive 1": 1}, {"receive 1": 1}, "op 3"),
        RankProgress(1, {"receive 2": 1}, {"receive 2": 1}, "op 2"),
        RankProgress(1, {}, {}, "op 1"),
    ]
    rank, message = find_late_rank(answers, "op 3", 60.0, NAMES)
    assert rank == 2 and message.startswith("Rank 6 is late: ranks 4 and 5 waited 60.0 s in op 3")
    assert find_late_rank([*answers[:2], None], "op 3", 60.0, NAMES)[0] == 2


def test_ranks_that_wait_for_each_other_are_a_deadlock() -> None:
    answers = [
        RankProgress(1, {f"receive {1 - rank}": 1}, {f"receive {1 - rank}": 1}, f"op {3 + rank}")
        for rank in (0, 1)
    ]
    rank, message = find_late_rank(answers, "op 3", 60.0, NAMES)
    assert rank == 0 and message.startswith("Rank 4 and the others wait for each other")
    assert message.endswith("in op 3, rank 5 in op 4: the ranks run different calls.")
