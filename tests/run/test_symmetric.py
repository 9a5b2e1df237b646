"""Symmetric memory of GPUs: the calls that are made, over a stand-in as bad as torch's rules allow."""

from __future__ import annotations

import gc
import re
import threading
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from tests.run.dense import Truth
from tests.run.fake_symmetric import CPU, Board, FakeSource, FakeStreams, Pool, parts, patch_streams, window
from tests.threads import ThreadComm, _Board, run_threads
from weft.core.errors import CommError
from weft.core.layout import Layout
from weft.core.problem import Problem
from weft.plan.choose import build
from weft.run.comm import shm, symmetric
from weft.run.comm.onesided import OneSidedComm
from weft.run.comm.symmetric import SymmetricWindow
from weft.run.comm.symmetric_block import SymmetricAllocator, SymmetricHandle
from weft.run.comm.watcher import Watcher
from weft.run.comm.window import Descriptor
from weft.run.execute import Executor
from weft.run.kernels import choose

GRANULE = 4096


@pytest.fixture(autouse=True)
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeStreams:
    monkeypatch.setattr(symmetric, "GRANULE", GRANULE)
    monkeypatch.setattr(symmetric, "ROUND_SECONDS", 0.01)
    return patch_streams(monkeypatch)


@pytest.fixture
def board(fake: FakeStreams) -> Callable[..., Board]:
    return lambda ranks, pad=4 * 4 * 16: Board(ranks, pad, fake)


def comm_over(board: Board, base: ThreadComm, **options: Any) -> OneSidedComm:
    comm = OneSidedComm(base, lambda base: (window(board, base), ""), 10.0, **options)
    # A process keeps its memory while others may still copy from it; a thread that is done would not.
    board.comms.append(comm)
    return comm


def problem_of(tokens: int, ranks: int = 4) -> Problem:
    layout = Layout.even(tokens, ranks)
    return Problem(batch=1, heads=3, kv_heads=3, head_dim=5, q=layout, kv=layout, dtype="float64")


def both_ways(comm: OneSidedComm, name: str, truths: list[Truth]) -> list[Any]:
    schedule = build(name, truths[0].problem, truths[0].mask)
    executor, answers = Executor(schedule, comm, choose("exact")), []
    for truth in truths:
        inputs = truth.inputs(comm.rank)
        out, saved = executor.forward(*inputs, truth.scale, keep=True)
        answers.append((out, executor.backward(truth.slope(comm.rank), inputs, out, saved, truth.scale)))
    return answers


def check(truths: list[Truth], by_rank: list[list[Any]]) -> None:
    for truth, results in zip(truths, zip(*by_rank, strict=True), strict=True):
        assert truth.output_error([out for out, _ in results]) < 1e-10
        assert truth.gradient_error([grads for _, grads in results]) < 1e-10 * truth.size


@pytest.mark.parametrize("name", ["ring", "ulysses", "gather+cuts", "usp:2x2", "torus:2x2"])
def test_attention_is_exact_and_leaves_no_signal(
    name: str, board: Callable[..., Board], fake: FakeStreams
) -> None:
    truths, shared = [Truth.of(problem_of(37), seed=seed) for seed in range(3)], board(4)

    def job(base: ThreadComm) -> list[Any]:
        comm = comm_over(shared, base)
        answers = both_ways(comm, name, truths)
        fake.drain()
        handle, _ = parts(comm.window)
        assert handle.calls.count("barrier") == 2 * len(truths), "one for each call"
        assert not handle.pads[comm.rank].any(), "every signal was taken"
        return answers

    check(truths, run_threads(4, job))


def message(
    comm: OneSidedComm, sends: dict[int, int], receives: list[int], size: int = 64, *, reserve: bool = True
) -> list[int]:
    """One call: send a number to each peer, and return those that came."""
    lender = comm.begin(CPU)
    assert lender is not None
    if reserve:
        lender.reserve(size * max(1, len(sends)))
    lent = lender.lend({str(peer): size for peer in sends})
    for peer, number in sends.items():
        lent[str(peer)].fill_(number)
    into = {peer: torch.zeros(size, dtype=torch.uint8) for peer in receives}
    going = [(peer, lent[str(peer)]) for peer in sends]
    transit = comm.post(going, list(into.items()), "op 0 (try)", 0)
    for peer in receives:
        transit.wait_for(peer)
    found = [int(buffer.unique()) for buffer in into.values()]
    lender.end()
    return found


def test_a_copy_waits_for_its_signal_and_its_buffer_and_the_barrier_for_the_copies(
    board: Callable[..., Board], fake: FakeStreams
) -> None:
    shared = board(2)

    def job(base: ThreadComm) -> tuple[list[str], list[str], list[str]]:
        comm = comm_over(shared, base)
        peer = 1 - comm.rank
        assert message(comm, {peer: comm.rank + 1}, [peer]) == [peer + 1]
        fake.drain()
        return fake.sides["land"].done, fake.sides["leave"].done, parts(comm.window)[0].calls

    for rank, (land, leave, calls) in enumerate(run_threads(2, job)):
        assert land == [f"wait {1 - rank}", "wait", "copy", "record", "record"]
        assert leave == ["wait", "barrier", "record", "record"]
        assert calls == [f"put {1 - rank}", f"wait {1 - rank}", "barrier"]


def test_a_message_is_passed_on_as_its_owner_has_it(board: Callable[..., Board]) -> None:
    """Rank 0 to 1 to 2: the copy of rank 1 may be overwritten once its readers are done."""
    shared = board(3)

    def job(base: ThreadComm) -> int:
        comm = comm_over(shared, base)
        lender = comm.begin(CPU)
        assert lender is not None
        lender.reserve(64)
        own, into = lender.lend({"own": 64})["own"].fill_(7), torch.zeros(64, dtype=torch.uint8)
        if comm.rank > 0:
            comm.post([], [(comm.rank - 1, into)], "in", 0).wait_for(comm.rank - 1)
        if comm.rank < 2:
            part = (own if comm.rank == 0 else into)[16:] if comm.rank else own
            comm.post([(comm.rank + 1, into if comm.rank else own)], [], "on", 0)
            assert comm._origin(part) == ((0, comm.window.place(own)[1] + 16) if comm.rank else None)  # type: ignore[union-attr,index]
            into.fill_(99) if comm.rank else None
        found = int(into.unique())
        lender.end()
        return found

    assert run_threads(3, job)[2] == 7


def test_the_sender_waits_until_its_half_was_copied(board: Callable[..., Board]) -> None:
    """Rank 0 sends and receives nothing: only the barriers hold it back."""
    shared, third = board(2), threading.Event()

    def job(base: ThreadComm) -> list[int]:
        comm, found = comm_over(shared, base), []
        for call in range(4):
            if comm.rank == 1 and call == 0:
                third.wait(0.3)  # until rank 0 has written its first half again, if it may
            if comm.rank == 0:
                message(comm, {1: call}, [])
                if call == 2:
                    third.set()
            else:
                found += message(comm, {}, [0])
        return found

    assert run_threads(2, job)[1] == [0, 1, 2, 3]


def test_a_half_is_written_again_when_devices_have_left_it_not_hosts(
    board: Callable[..., Board], fake: FakeStreams
) -> None:
    shared, may_leave = board(2), threading.Event()

    def job(base: ThreadComm) -> None:
        comm = comm_over(shared, base)
        if comm.rank == 1:
            fake.side(CPU, "leave").put("busy", lambda: None if may_leave.wait(5.0) else None)
        for _ in range(2):
            message(comm, {}, [])
        if comm.rank == 1:
            threading.Timer(0.2, may_leave.set).start()
        comm.begin(CPU)
        assert may_leave.is_set()

    run_threads(2, job)


def test_a_signal_is_queued_before_the_words_are_sent(board: Callable[..., Board]) -> None:
    """So that whoever has the words waits for what is queued already."""

    def job(found: SymmetricWindow) -> list[str]:
        (handle, _), mail = parts(found), found._host
        put = mail.put
        mail.put = lambda *args: handle.calls.append("words") or put(*args)  # type: ignore[func-returns-value,method-assign]
        found.put(1 - found.rank, Descriptor(0, 0, 0, 0), 5.0)
        return handle.calls

    assert run(board(2), job) == [["put 1", "words"], ["put 0", "words"]]


def test_bytes_that_were_copied_to_twice_are_the_last_message() -> None:
    comm = OneSidedComm(ThreadComm(_Board(1, 1.0), 0), shm.rendezvous, 1.0)
    buffer = torch.zeros(96, dtype=torch.uint8)
    comm.note_copy(buffer[:64], Descriptor(0, 3, 1000, 64))
    assert comm._origin(buffer[16:64]) == (3, 1016)
    comm.note_copy(buffer[32:], Descriptor(0, 5, 9000, 64))
    assert comm._origin(buffer[40:64]) == (5, 9008)
    assert comm._origin(buffer[:16]) is None


def test_memory_grows_to_need_in_one_block_and_is_given_back(board: Callable[..., Board]) -> None:
    shared = board(2)

    def job(base: ThreadComm) -> None:
        comm = comm_over(shared, base)
        peer = 1 - comm.rank
        for size, half in ((64, GRANULE), (GRANULE + 1, 2 * GRANULE), (100, 2 * GRANULE)):
            mine = size if comm.rank else 32  # rank 0 alone would need less
            lender = comm.begin(CPU)
            assert lender is not None
            lender.reserve(mine)
            assert message(comm, {peer: comm.rank}, [peer], 32) == [peer]
            lender.end()
            gc.collect()
            _, pool = parts(comm.window)
            assert sorted(pool.held.values()) == [GRANULE, 2 * half], "signals, and two halves"
        assert comm.window is not None
        comm.window.close()
        gc.collect()
        assert not pool.held

    run_threads(2, job)


def test_a_program_that_was_bound_to_memory_that_moved_is_bound_again(board: Callable[..., Board]) -> None:
    small, large, shared = Truth.of(problem_of(20)), Truth.of(problem_of(90)), board(4)

    def job(base: ThreadComm) -> list[Any]:
        comm = comm_over(shared, base)
        answers: list[Any] = []
        executors = [
            Executor(build("ring", each.problem, each.mask), comm, choose("exact")) for each in (small, large)
        ]
        for truth, executor in ((small, 0), (large, 1), (small, 0), (large, 1)):
            inputs = truth.inputs(comm.rank)
            answers.append(executors[executor].forward(*inputs, truth.scale, keep=False)[0])
        _, pool = parts(comm.window)
        gc.collect()
        assert len(pool.held) == 2, "signals and one block: nothing views the first one"
        return answers

    by_rank = run_threads(4, job)
    for truth, outs in zip((small, large, small, large), zip(*by_rank, strict=True), strict=True):
        assert truth.output_error(list(outs)) < 1e-10


@pytest.mark.parametrize("first", ["world", "pair"])
def test_groups_share_one_block(first: str, board: Callable[..., Board], fake: FakeStreams) -> None:
    """Also where some ranks had to grow theirs for another group before."""
    everyone, pairs = board(4), [board(2), board(2)]
    boards = [_Board(2, 10.0) for _ in pairs]

    def job(base: ThreadComm) -> tuple[int, list[int]]:
        pool, pair = Pool(), base.rank // 2
        world = OneSidedComm(base, lambda base: (window(everyone, base, pool), ""), 10.0)
        inside = ThreadComm(boards[pair], base.rank % 2)
        half = OneSidedComm(inside, lambda base: (window(pairs[pair], base, pool, f"pair {pair}"), ""), 10.0)
        found: list[int] = []
        for turn in range(4):
            if turn or first == "world":
                found += message(world, {(base.rank + 1) % 4: 10 * turn + base.rank}, [(base.rank + 3) % 4])
            size = 64 if pair else 2 * GRANULE
            found += message(half, {1 - inside.rank: 100 + turn}, [1 - inside.rank], size)
        fake.drain()
        gc.collect()
        return len(pool.held), found

    by_rank = run_threads(4, job)
    for rank, (held, found) in enumerate(by_rank):
        assert held == 3, "signals of each group, and one block"
        around = [10 * turn + (rank + 3) % 4 for turn in range(4)]
        assert [each for each in found if each < 100] == (around if first == "world" else around[1:])
        assert [each for each in found if each >= 100] == [100, 101, 102, 103]


def test_a_group_that_comes_to_a_block_waits_for_readers_of_other_groups(
    board: Callable[..., Board], fake: FakeStreams
) -> None:
    """Rank 2 has not yet copied what rank 0 sent to it when ranks 0 and 1 make another call."""
    everyone, pair, inside, written = board(3), board(2), _Board(2, 10.0), threading.Event()

    def job(base: ThreadComm) -> list[int]:
        pool = Pool()
        world = OneSidedComm(base, lambda base: (window(everyone, base, pool), ""), 10.0)
        if base.rank == 2:
            lender, into = world.begin(CPU), torch.zeros(64, dtype=torch.uint8)
            assert lender is not None
            lender.reserve(64)
            transit = world.post([], [(0, into)], "op 0 (try)", 0)
            written.wait(0.3)
            transit.wait_for(0)
            lender.end()
            fake.drain()
            return into.unique().tolist()
        message(world, {2: 7} if base.rank == 0 else {}, [])
        half = OneSidedComm(
            ThreadComm(inside, base.rank), lambda base: (window(pair, base, pool, "pair"), ""), 10.0
        )
        message(half, {1 - base.rank: 9}, [1 - base.rank])
        written.set()
        fake.drain()
        return []

    assert run_threads(3, job)[2] == [7]


def run(shared: Board, job: Callable[[SymmetricWindow], Any], capacity: int = GRANULE) -> list[Any]:
    def prepared(base: ThreadComm) -> Any:
        found = window(shared, base)
        found.reserve(capacity, 10.0)
        return job(found)

    return run_threads(shared.ranks, prepared)


def test_more_messages_than_the_pad_has_channels_are_refused_before_they_block(
    board: Callable[..., Board], fake: FakeStreams
) -> None:
    def job(found: SymmetricWindow) -> None:
        peer = 1 - found.rank
        for _ in range(7):  # 8 channels, of which barriers have one
            found.put(peer, Descriptor(0, 0, 0, 0), 5.0)
        with pytest.raises(CommError, match="More than 7 messages.*set_signal_pad_size"):
            found.put(peer, Descriptor(0, 0, 0, 0), 5.0)
        for _ in range(7):
            found.wait(peer, 5.0)
        found.arrive(1)
        fake.drain()
        found.put(peer, Descriptor(0, 0, 0, 0), 5.0)
        found.wait(peer, 5.0)

    run(board(2, 4 * 2 * 8), job)


def test_what_is_out_of_bounds_or_too_large_is_refused(board: Callable[..., Board]) -> None:
    def job(found: SymmetricWindow) -> None:
        size = 2 * GRANULE
        for owner, offset, count in ((0, size - 4, 8), (1, -8, 8), (2, 0, 8), (0, 8, -8), (0, 0, size + 1)):
            with pytest.raises(CommError, match="out of bounds"):
                found.get(owner, offset, count)
        with pytest.raises(CommError, match=f"a half of symmetric memory {GRANULE}"):
            found.allocate(0, GRANULE + 1)
        assert found.place(torch.zeros(8)) is None

    run(board(2), job)


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_peer_that_does_not_come_is_named_and_streams_are_let_go(
    is_awaited: bool, board: Callable[..., Board], fake: FakeStreams
) -> None:
    shared = board(3)

    def job(base: ThreadComm) -> str:
        comm = OneSidedComm(base, lambda base: (window(shared, base), ""), 0.3)
        message(comm, {}, [])
        if comm.rank == 2:
            over.wait(10.0)  # alive, but in no second call
            return ""
        if is_awaited:
            with pytest.raises(CommError) as caught:
                message(comm, {}, [2], reserve=False)
        else:
            for _ in range(2):
                message(comm, {}, [], reserve=False)
            with pytest.raises(CommError) as caught:
                message(comm, {}, [], reserve=False)
            fake.drain()  # barriers that rank 2 never comes to
        both.wait(10.0)
        over.set()
        return str(caught.value)

    over, both = threading.Event(), threading.Barrier(2)
    what = "op 0 (try)" if is_awaited else "op 0 (leave to write again)"
    for rank, text in enumerate(run_threads(3, job)[:2]):
        # Whoever gives up first says so to the other.
        assert re.match(rf"Rank {rank} waited [\d.]+ s for {re.escape(what)} from rank [01]?2?: .*", text)


def test_a_wait_whose_signal_never_comes_ends_when_the_watcher_has_decided(
    board: Callable[..., Board],
) -> None:
    """The peer's host has sent the words, and its device is stuck before the signal."""
    shared = board(2)

    def job(base: ThreadComm) -> bool:
        found = window(shared, base)
        found.reserve(64, 10.0)
        if base.rank == 1:
            found._host.put(0, Descriptor(0, 1, 0, 64), 5.0)
            return True
        words = found.wait(1, 5.0)
        into = torch.zeros(64, dtype=torch.uint8)
        landed = found.land(found.get(*words[1:]), into, symmetric.streams.record(CPU))
        threading.Timer(0.1, found.release).start()
        landed.synchronize()
        return landed.query()

    assert run_threads(2, job) == [True, True]


class Watching:
    """In place of the group's watcher."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, list[Any], bool]] = []
        self.on_failure: list[Callable[[], None]] = []

    def watch(self, works: Any, event: Any, label: str, messages: list[Any], timeout: float) -> None:
        assert event.query() and timeout == 10.0
        self.seen.append((label, messages, works[0].is_completed()))


def test_both_ends_of_a_message_are_watched(board: Callable[..., Board]) -> None:
    shared = board(2)

    def job(base: ThreadComm) -> list[Any]:
        comm, watcher = comm_over(shared, base), Watching()
        comm.watcher = watcher  # type: ignore[assignment]
        message(comm, {1 - comm.rank: 3}, [1 - comm.rank])
        return watcher.seen

    for rank, seen in enumerate(run_threads(2, job)):
        label, peer = "op 0 (try)", 1 - rank
        assert seen == [(label, [("send", peer)], True), (label, [("receive", peer)], False)]


def test_a_group_that_fails_ends_the_waits_of_its_windows_before_its_communicator() -> None:
    ended: list[str] = []
    watcher = Watcher(HashStore(), 0, [0, 1], lambda: ended.append("communicator"))

    def fail() -> None:
        ended.append("window")
        raise RuntimeError("its memory is gone")

    watcher.on_failure.append(fail)
    watcher._fail("Rank 1 is late.")
    assert ended == ["window", "communicator"]
    with pytest.raises(CommError, match="Rank 1 is late"):
        watcher.check()


def test_without_a_gpu_all_ranks_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = run_threads(2, partial(symmetric.rendezvous, None))  # type: ignore[arg-type]
    assert found == [(None, "symmetric memory needs a GPU")] * 2


@pytest.mark.parametrize(("backend", "expected"), [("NVSHMEM", "torch has it by NVSHMEM"), ("CUDA", "")])
def test_torch_must_have_it_by_cuda(backend: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(symmetric, "symmetric_backend", lambda _: backend)
    assert symmetric._missing().startswith(expected) and bool(symmetric._missing()) == bool(expected)


@pytest.mark.parametrize("fails", ["empty", "rendezvous"])
def test_ranks_agree_that_one_of_them_cannot(fails: str, board: Callable[..., Board]) -> None:
    shared = board(2)

    def job(base: ThreadComm) -> tuple[Any, str]:
        mail, _ = shm.rendezvous(base)
        assert mail is not None
        source = FakeSource(shared, base.rank, Pool())

        def fail(_: Any) -> Any:
            raise RuntimeError("no peer access\nat some line")

        if base.rank == 1 or fails == "rendezvous":  # a rendezvous fails on all ranks, or blocks them
            setattr(source, fails, fail)
        return symmetric.window_of(source, base, mail)

    other = "rank 1 has no symmetric memory" if fails == "empty" else "no peer access"
    assert run_threads(2, job) == [(None, other), (None, "no peer access")]


def test_memory_that_does_not_fit_on_one_rank_is_an_error_on_all(board: Callable[..., Board]) -> None:
    def job(found: SymmetricWindow) -> None:
        _, pool = parts(found)
        taken = pool.empty(2_000_000) if found.rank == 1 else None
        with pytest.raises(CommError, match=r"3,\d\d\d,\d\d\d bytes for messages does not fit on rank 1"):
            found.reserve(1_500_000, 10.0)
        del taken

    run(board(2), job)


def test_torch_has_what_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._C._distributed_c10d import _SymmetricMemory

    names = [name for name in vars(SymmetricHandle) if not name.startswith("_")]
    assert len(names) == 9
    assert not [name for name in names if not hasattr(_SymmetricMemory, name)]
    asked: list[Any] = []
    monkeypatch.setattr(_SymmetricMemory, "empty_strided_p2p", lambda *args: asked.append(args))
    monkeypatch.setattr(_SymmetricMemory, "rendezvous", lambda *args: asked.append(args))
    cuda = torch.device("cuda", 3)
    source = SymmetricAllocator(SimpleNamespace(group_name="pair"), cuda)  # type: ignore[arg-type]
    source.empty(10)
    source.rendezvous(torch.zeros(1))
    assert asked == [((10,), (1,), torch.uint8, cuda), (torch.zeros(1), "pair")]
