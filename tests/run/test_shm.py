"""Shared memory as a transport, with threads as ranks: exact, in bounds, in time, and never read too late."""

from __future__ import annotations

import errno
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.cases import Case, cases
from tests.run.dense import Truth
from tests.threads import ThreadComm, run_threads
from weft.core.errors import CommError, InputError
from weft.core.layout import Layout
from weft.core.problem import Problem
from weft.plan.choose import build
from weft.run.comm import shm
from weft.run.comm.onesided import CallMemory, OneSidedComm
from weft.run.comm.shared_segment import MAILBOX_SLOTS, SegmentInfo, SharedSegment
from weft.run.comm.shm import ShmWindow
from weft.run.comm.window import Descriptor, LatePeerError
from weft.run.execute import Executor
from weft.run.kernels import choose
from weft.run.transport import transport

CPU = torch.device("cpu")
Job = Callable[[OneSidedComm], Any]


def run(ranks: int, job: Job, *, timeout: float = 10.0, strict: bool = False) -> list[Any]:
    return run_threads(ranks, lambda base: job(OneSidedComm(base, shm.rendezvous, timeout, strict=strict)))


def begun(comm: OneSidedComm) -> CallMemory:
    lender = comm.begin(CPU)
    assert lender is not None, comm.reason
    return lender


def nowhere(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, device="meta")


def both_ways(executor: Executor, truth: Truth) -> tuple[Any, Any]:
    rank = executor.comm.rank
    out, saved = executor.forward(*truth.inputs(rank), truth.scale, keep=True)
    return out, executor.backward(truth.slope(rank), truth.inputs(rank), out, saved, truth.scale)


@settings(max_examples=40)
@given(case=cases(61, max_ranks=5), keep=st.sampled_from(("all", "none", "auto")))
def test_any_schedule_in_shared_memory_equals_dense_attention(case: Case, keep: str) -> None:
    truths = [Truth.of(case.problem, case.mask, seed=seed) for seed in range(3)]

    def job(comm: OneSidedComm) -> list[Any]:
        executor = Executor(case.schedule, comm, choose("exact"), keep=keep)
        return [both_ways(executor, truth) for truth in truths]

    by_rank = run(case.problem.ranks, job)
    for truth, results in zip(truths, zip(*by_rank, strict=True), strict=True):
        assert truth.output_error([out for out, _ in results]) < 1e-10
        assert truth.gradient_error([grads for _, grads in results]) < 1e-10 * truth.size


def problem(ranks: int, tokens: int) -> Problem:
    layout = Layout.even(tokens, ranks)
    return Problem(batch=1, heads=3, kv_heads=3, head_dim=5, q=layout, kv=layout, dtype="float64")


@pytest.mark.parametrize("name", ["ring", "ulysses", "gather", "usp:2x2"])
def test_ranks_of_two_machines_share_memory_where_they_can(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = threading.local()
    monkeypatch.setattr(shm, "_machine", lambda: here.machine)
    truth = Truth.of(problem(4, 37))
    schedule = build(name, truth.problem, truth.mask)

    def job(base: ThreadComm) -> Any:
        here.machine = 1 + base.rank // 2
        comm = OneSidedComm(base, shm.rendezvous, 10.0)
        executor = Executor(schedule, comm, choose("exact"))
        results = [both_ways(executor, truth) for _ in range(3)]
        assert comm.window is not None
        return results, comm.window.near, comm.bytes_sent - base.bytes_sent, comm.reason

    answers, near, shared, reasons = zip(*run_threads(4, job), strict=True)
    assert near == ({1}, {0}, {3}, {2})
    assert "[2, 3] are on other machines" in reasons[0]
    assert all(count > 0 for count in shared) or name == "ring"
    for results in zip(*answers, strict=True):
        assert truth.output_error([out for out, _ in results]) < 1e-10
        assert truth.gradient_error([grads for _, grads in results]) < 1e-10 * truth.size


def test_a_ring_passes_on_where_a_message_lies_and_not_the_message() -> None:
    truth = Truth.of(problem(3, 37))
    schedule = build("ring", truth.problem, truth.mask)

    def job(comm: OneSidedComm) -> list[tuple[int, int]]:
        executor, told = Executor(schedule, comm, choose("exact")), []
        executor.forward(*truth.inputs(comm.rank), truth.scale, keep=False)
        window = comm.window
        assert isinstance(window, ShmWindow)
        put = window.put

        def spied(peer: int, words: Descriptor, timeout: float) -> None:
            told.append((words.owner, window._segments[window.rank]._filled[0]))
            put(peer, words, timeout)

        window.put = spied  # type: ignore[method-assign]
        executor.forward(*truth.inputs(comm.rank), truth.scale, keep=False)
        return told

    kv = 2 * 3 * 13 * 5 * 8
    for rank, told in enumerate(run(3, job)):
        (first, _), (second, memory) = told
        assert first == rank != second
        assert memory <= kv + 256, "a rank has memory for its own message only"


def test_a_slow_reader_still_reads_what_was_sent_to_it() -> None:
    """Rank 0 is a call ahead; it may not be two calls ahead."""
    ahead, read = threading.Barrier(2), threading.Event()

    def job(comm: OneSidedComm) -> Any:
        seen, lender = [], begun(comm)
        for call in (1, 2):
            if comm.rank == 0:
                out = lender.lend({"m": 100})["m"].fill_(call)
                comm.post([(1, out)], [], "op 0", 7)
                lender.end()
                lender = begun(comm) if call == 1 else lender
        if comm.rank == 0:
            ahead.wait(10)
            comm.timeout = 0.1
            with pytest.raises(CommError, match="Rank 0 waited 0.1 s for op 0 .*from rank 1"):
                comm.begin(CPU)
            read.set()
            return None
        ahead.wait(10)
        read.wait(10)
        found = comm.post([], [(0, nowhere(100))], "op 0", 7).wait_for(0)
        seen.append(found)
        return [int(x.unique()) for x in seen]

    assert run(2, job)[1] == [1]


def test_messages_of_different_plans_never_meet_and_may_be_awaited_in_any_order() -> None:
    def job(comm: OneSidedComm) -> list[int]:
        peer, lender = 1 - comm.rank, begun(comm)
        sent = lender.lend({str(i): 10 + i for i in range(4)})
        for number, x in enumerate(sent.values()):
            x.fill_(10 * comm.rank + number)
        transits = {}
        for number in range(4):
            out = (peer, sent[str(number)])
            transits[number] = comm.post([out], [(peer, nowhere(10 + number))], f"op {number}", number % 2)
        return [int(transits[number].wait_for(peer)[0]) for number in (3, 0, 2, 1)]  # type: ignore[index]

    assert run(2, job) == [[13, 10, 12, 11], [3, 0, 2, 1]]


def test_plans_that_come_and_go_leave_nothing_behind() -> None:
    """Also where a rank is a plan ahead, and where messages of one plan are awaited in another order."""

    def job(comm: OneSidedComm) -> list[int]:
        peer, left = 1 - comm.rank, []
        for tag in range(12):
            lender = begun(comm)
            sent = lender.lend({"a": 8, "b": 8})
            for number, x in enumerate(sent.values()):
                x.fill_(2 * tag + number)
            first, last = (comm.post([(peer, x)], [(peer, nowhere(8))], "op", tag) for x in sent.values())
            found = [int(transit.wait_for(peer)[0]) for transit in (last, first)]  # type: ignore[index]
            assert found == [2 * tag + 1, 2 * tag]
            lender.end()
            if tag in (3, 11):
                left.append(sum(len(held) for held in vars(comm).values() if isinstance(held, dict)))
        return left

    for early, late in run(2, job):
        assert late <= early + 2  # the peer may be a plan ahead, with two messages


def test_full_boxes_do_not_block_each_other() -> None:
    many = 3 * MAILBOX_SLOTS

    def job(comm: OneSidedComm) -> list[int]:
        begun(comm)
        window = comm.window
        assert window is not None
        for number in range(many):
            window.put(1 - comm.rank, Descriptor(number, 0, 0, 0), 10.0)
        return [window.wait(1 - comm.rank, 10.0).tag for _ in range(many)]

    assert run(2, job) == [list(range(many))] * 2


@pytest.mark.parametrize(
    "words",
    [
        Descriptor(0, 0, 1 << 60, 8),
        Descriptor(0, 0, -8, 8),
        Descriptor(0, 0, 0, -8),
        Descriptor(0, 0, 0, 1 << 62),
        Descriptor(0, 5, 0, 8),
    ],
)
def test_words_that_point_out_of_bounds_are_refused(words: Descriptor) -> None:
    def job(comm: OneSidedComm) -> None:
        begun(comm)
        assert comm.window is not None
        if comm.rank == 0:
            comm.window.put(1, words, 1.0)
            return
        transit = comm.post([], [(0, nowhere(8))], "op 3", 0)
        with pytest.raises(CommError, match="out of bounds"):
            transit.wait_for(0)

    run(2, job)


def test_a_message_of_another_size_is_refused() -> None:
    def job(comm: OneSidedComm) -> None:
        lender = begun(comm)
        if comm.rank == 0:
            comm.post([(1, lender.lend({"m": 9})["m"])], [], "op 3", 0)
            return
        with pytest.raises(CommError, match="op 3: rank 0 sent 9 bytes, expected 8"):
            comm.post([], [(0, nowhere(8))], "op 3", 0).wait_for(0)

    run(2, job)


def test_a_message_outside_the_window_is_refused() -> None:
    def job(comm: OneSidedComm) -> None:
        begun(comm)
        with pytest.raises(CommError, match="must lie in memory that begin"):
            comm.post([(1 - comm.rank, torch.zeros(8, dtype=torch.uint8))], [], "op 0", 0)

    run(2, job)


MINE = SegmentInfo(run=77, rank=1, ranks=2, half=1 << 16)


@pytest.mark.parametrize(
    ("told", "match"),
    [
        (SegmentInfo(78, 1, 2, 1 << 16), "another run"),
        (SegmentInfo(77, 0, 2, 1 << 16), "another run"),
        (SegmentInfo(77, 1, 2, 1 << 17), r"has \d+ bytes, expected \d+"),
        (SegmentInfo(77, 1, 9, 1 << 16), r"has \d+ bytes, expected \d+"),
    ],
)
def test_a_segment_of_another_run_rank_or_size_is_refused(told: SegmentInfo, match: str) -> None:
    segment = SharedSegment.create(MINE)
    assert SharedSegment.open(f"/proc/self/fd/{segment.fd}", MINE).tensor().numel() == 2 << 16
    with pytest.raises(CommError, match=match):
        SharedSegment.open(f"/proc/self/fd/{segment.fd}", told)


def test_a_segment_of_another_user_or_open_to_others_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = SharedSegment.create(MINE)
    path = f"/proc/self/fd/{segment.fd}"
    os.fchmod(segment.fd, 0o640)
    with pytest.raises(CommError, match="accessible to this user only"):
        SharedSegment.open(path, MINE)
    os.fchmod(segment.fd, 0o600)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(CommError, match="accessible to this user only"):
        SharedSegment.open(path, MINE)


def test_a_segment_that_could_shrink_under_its_readers_is_refused() -> None:
    fd = os.memfd_create("weft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.truncate(fd, MINE.size)
        os.pwrite(fd, MINE.header(), 0)
        with pytest.raises(CommError, match="sealed against shrinking"):
            SharedSegment.open(f"/proc/self/fd/{fd}", MINE)
    finally:
        os.close(fd)
    segment = SharedSegment.create(MINE)
    with pytest.raises(OSError, match="not permitted"):
        os.truncate(segment.fd, 0)


def test_a_peers_memory_is_read_only_and_has_no_name() -> None:
    segment = SharedSegment.create(MINE)
    peer = SharedSegment.open(f"/proc/self/fd/{segment.fd}", MINE)
    modes = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, mode = int(line.split("-")[0], 16), line.split()[1]
        modes[start] = mode
    assert modes[segment.data] == "rw-s"
    assert modes[peer.data] == "r--s"
    assert os.fstat(segment.fd).st_nlink == 0


def test_views_keep_the_memory_that_they_lie_in() -> None:
    memory = SharedSegment.create(MINE).tensor()
    memory.fill_(3)
    assert int(memory.sum()) == 3 * memory.numel()


def test_memory_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    segment = SharedSegment.create(MINE)
    segment.fill(0, 1 << 16)
    with pytest.raises(CommError, match="a half has 65536 bytes.*transport='group'"):
        segment.fill(1, (1 << 16) + 1)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(CommError, match="No space left"):
        segment.fill(1, 10)


def test_who_is_late_is_named_with_what_was_awaited() -> None:
    def job(comm: OneSidedComm) -> None:
        begun(comm)
        comm.timeout = 0.1
        if comm.rank == 0:
            with pytest.raises(CommError, match=r"waited [\d.]+ s for op 4 .hop. from rank 2: no sign"):
                comm.post([], [(2, nowhere(8))], "op 4 (hop)", 0).wait_for(2)

    run(3, job)


def test_who_gives_up_takes_those_along_who_wait_for_it() -> None:
    def job(comm: OneSidedComm) -> str:
        begun(comm)
        comm.timeout = 0.1 if comm.rank == 2 else 3600.0
        with pytest.raises(CommError) as caught:
            comm.post([], [((comm.rank + 1) % 3, nowhere(8))], "op 0", 0).wait_for((comm.rank + 1) % 3)
        return str(caught.value)

    first, second, third = run(3, job)
    assert "from rank 0: no sign" in third
    assert "from rank 2: it has given up" in second
    assert "from rank 1: it has given up" in first


def test_a_dead_peer_is_noticed_before_the_time_is_over() -> None:
    dead = subprocess.Popen(["true"])
    process = os.pidfd_open(dead.pid)
    dead.wait()
    ours, theirs = (SharedSegment.create(SegmentInfo(rank, rank, 2, 1 << 16)) for rank in range(2))
    window = ShmWindow(0, {0: ours, 1: theirs}, {1: process})
    other = ShmWindow(1, {0: ours, 1: theirs}, {})
    other.put(0, Descriptor(5, 1, 0, 0), 1.0)
    assert window.wait(1, 3600.0).tag == 5, "what it said before it died still counts"
    with pytest.raises(LatePeerError, match="its process has ended"):
        window.wait(1, 3600.0)
    with pytest.raises(LatePeerError, match="its process has ended"):
        window.barrier(1, 3600.0)


def test_a_rank_without_shared_memory_makes_all_use_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    this = threading.local()
    monkeypatch.setattr(shm, "unavailable_reason", lambda: "no compiler" if this.rank == 1 else "")
    truth = Truth.of(problem(2, 11))
    schedule = build("ring", truth.problem, truth.mask)

    def job(base: ThreadComm) -> Any:
        this.rank = base.rank
        comm = OneSidedComm(base, shm.rendezvous, 10.0)
        return both_ways(Executor(schedule, comm, choose("exact")), truth), comm.window, comm.reason

    results, windows, reasons = zip(*run_threads(2, job), strict=True)
    assert windows == (None, None)
    assert "[1]" in reasons[0]
    assert reasons[1] == "no compiler"
    assert truth.output_error([out for out, _ in results]) < 1e-10


def test_who_insists_on_shared_memory_is_told_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm, "unavailable_reason", lambda: "no compiler")

    def job(comm: OneSidedComm) -> None:
        with pytest.raises(CommError, match="no compiler.*transport='auto' .WEFT_TRANSPORT=auto"):
            comm.begin(CPU)

    run(2, job, strict=True)


def test_a_peer_that_cannot_be_mapped_makes_all_use_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = SharedSegment.open

    def refuse(path: str, identity: SegmentInfo) -> SharedSegment:
        if identity.rank == 2:
            raise PermissionError(errno.EACCES, "not yours")
        return opened(path, identity)

    monkeypatch.setattr(SharedSegment, "open", staticmethod(refuse))
    found = run_threads(3, shm.rendezvous)
    assert [window for window, _ in found] == [None] * 3
    assert "not yours" in found[0][1]
    assert "rank 0 cannot map" in found[2][1]


def test_the_environment_may_ask_for_a_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_TRANSPORT", raising=False)
    assert transport() == "auto"
    monkeypatch.setenv("WEFT_TRANSPORT", "pigeon")
    with pytest.raises(InputError, match="pigeon.*auto, group, shm"):
        transport()
