"""Symmetric memory of GPUs: the calls that are made, against a stand-in that keeps torch's rules."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from tests.run.dense import Truth
from weft.core.errors import CommError
from weft.core.layout import Layout
from weft.core.problem import Problem
from weft.plan.choose import build
from weft.run.comm import shm, symmetric
from weft.run.comm.onesided import OneSidedComm
from weft.run.comm.symmetric import SymmetricWindow
from weft.run.comm.threads import ThreadComm, run_threads
from weft.run.comm.window import HALVES, Words
from weft.run.execute import Executor
from weft.run.kernels import choose

PAD = 4 * 4 * 16  # 16 channels of 4 ranks


class Board:
    """What the ranks of a stand-in share: memory, signal pads, and who has come."""

    def __init__(self, ranks: int, pad: int = PAD) -> None:
        self.ranks, self.pad_size = ranks, pad
        self.memory: dict[int, Tensor] = {}
        self.pads = [[0] * (pad // 4) for _ in range(ranks)]
        self.changed = threading.Condition()
        self.met = threading.Barrier(ranks)

    def rendezvous(self, memory: Tensor, rank: int) -> FakeHandle:
        self.memory[rank] = memory
        self.met.wait(10)
        assert len({(x.shape, x.dtype) for x in self.memory.values()}) == 1, "as large on all ranks"
        return FakeHandle(self, rank)


class FakeHandle:
    """torch's rules: bounds of buffers and pads; a signal is a word that is set once and taken once."""

    device = torch.device("cpu")

    def __init__(self, board: Board, rank: int) -> None:
        self.board, self.rank = board, rank
        self.calls: list[str] = []

    @property
    def buffer_ptrs(self) -> list[int]:
        return [self.board.memory[rank].data_ptr() for rank in range(self.board.ranks)]

    @property
    def buffer_size(self) -> int:
        return self.board.memory[self.rank].numel()

    @property
    def signal_pad_size(self) -> int:
        return self.board.pad_size

    def get_buffer(self, rank: int, sizes: tuple[int], dtype: torch.dtype, storage_offset: int) -> Tensor:
        assert 0 <= rank < self.board.ranks
        assert dtype == torch.uint8
        assert 0 <= storage_offset <= storage_offset + sizes[0] <= self.buffer_size
        return self.board.memory[rank][storage_offset : storage_offset + sizes[0]]

    def barrier(self, channel: int, timeout_ms: int) -> None:
        self.calls.append("barrier")
        for peer in range(self.board.ranks):
            if peer != self.rank:
                self._put(peer, channel, timeout_ms)
        for peer in range(self.board.ranks):
            if peer != self.rank:
                self._wait(peer, channel, timeout_ms)

    def put_signal(self, dst_rank: int, channel: int, timeout_ms: int) -> None:
        self.calls.append(f"put {dst_rank}")
        self._put(dst_rank, channel, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int, timeout_ms: int) -> None:
        self.calls.append(f"wait {src_rank}")
        self._wait(src_rank, channel, timeout_ms)

    def _word(self, channel: int, rank: int) -> int:
        assert 0 <= channel < self.board.pad_size // 4 // self.board.ranks, "a channel that the pad has not"
        return channel * self.board.ranks + rank

    def _put(self, peer: int, channel: int, timeout_ms: int) -> None:
        pad, word = self.board.pads[peer], self._word(channel, self.rank)
        with self.board.changed:
            assert self.board.changed.wait_for(lambda: pad[word] == 0, timeout_ms / 1000), "put for ever"
            pad[word] = 1
            self.board.changed.notify_all()

    def _wait(self, peer: int, channel: int, timeout_ms: int) -> None:
        pad, word = self.board.pads[self.rank], self._word(channel, peer)
        with self.board.changed:
            assert self.board.changed.wait_for(lambda: pad[word] == 1, timeout_ms / 1000), "waits for ever"
            pad[word] = 0
            self.board.changed.notify_all()


def window(board: Board, base: ThreadComm, capacity: int = 1 << 16) -> SymmetricWindow:
    mail, reason = shm.meet(base)
    assert mail is not None, reason
    memory = torch.zeros(HALVES * capacity, dtype=torch.uint8)
    return SymmetricWindow(board.rendezvous(memory, base.rank), mail, base.size)


def handle_of(found: Any) -> FakeHandle:
    return found._handle


def run(ranks: int, job: Callable[[SymmetricWindow], Any], pad: int = PAD) -> list[Any]:
    board = Board(ranks, pad)
    return run_threads(ranks, lambda base: job(window(board, base)))


@pytest.mark.parametrize("name", ["ring", "ulysses", "gather+cuts", "usp:2x2"])
@pytest.mark.parametrize("sync", ["barrier", "flags"])
def test_attention_over_symmetric_memory_is_exact_and_leaves_no_signal(name: str, sync: str) -> None:
    layout = Layout.even(37, 4)
    problem = Problem(batch=1, heads=3, kv_heads=3, head_dim=5, q=layout, kv=layout, dtype="float64")
    truths = [Truth.of(problem, seed=seed) for seed in range(3)]
    schedule, board = build(name, problem, truths[0].mask), Board(4)

    def job(base: ThreadComm) -> list[Any]:
        comm = OneSidedComm(base, lambda base: (window(board, base), ""), 10.0, sync=sync)
        executor, answers = Executor(schedule, comm, choose("exact")), []
        for truth in truths:
            inputs = truth.inputs(comm.rank)
            out, saved = executor.forward(*inputs, truth.scale, keep=True)
            answers.append((out, executor.backward(truth.slope(comm.rank), inputs, out, saved, truth.scale)))
        barriers = handle_of(comm.window).calls.count("barrier")
        assert barriers == 2 * len(truths) - (HALVES if sync == "barrier" else 1), "one for each call"
        return answers

    by_rank = run_threads(4, job)
    assert not any(any(pad) for pad in board.pads), "every signal was taken"
    for truth, results in zip(truths, zip(*by_rank, strict=True), strict=True):
        assert truth.output_error([out for out, _ in results]) < 1e-10
        assert truth.gradient_error([grads for _, grads in results]) < 1e-10 * truth.size


@pytest.mark.parametrize("timeout", [5.0, inf])
def test_a_signal_goes_before_the_words_and_is_awaited_before_the_data(timeout: float) -> None:
    def job(found: SymmetricWindow) -> list[str]:
        peer = 1 - found.rank
        place = found.place(found.allocate(1, 100))
        assert place == (found.rank, found._half)
        found.put(peer, Words(3, *place, 100), timeout)
        words = found.wait(peer, timeout)
        assert words == Words(3, peer, found._half, 100)
        assert found.place(found.get(*words[1:])) == (peer, found._half)
        return handle_of(found).calls

    assert run(2, job) == [["put 1", "wait 1"], ["put 0", "wait 0"]]


def test_more_messages_than_the_pad_has_channels_are_refused_before_they_block() -> None:
    def job(found: SymmetricWindow) -> None:
        for _ in range(7):  # 8 channels, of which barriers have one
            found.put(1 - found.rank, Words(0, 0, 0, 0), 5.0)
        with pytest.raises(CommError, match="More than 7 messages.*set_signal_pad_size"):
            found.put(1 - found.rank, Words(0, 0, 0, 0), 5.0)
        for _ in range(7):
            found.wait(1 - found.rank, 5.0)
        found.arrive(1)
        found.barrier(1, 5.0)
        found.put(1 - found.rank, Words(0, 0, 0, 0), 5.0)
        found.wait(1 - found.rank, 5.0)

    run(2, job, pad=4 * 2 * 8)


def test_what_is_out_of_bounds_or_too_large_is_refused() -> None:
    def job(found: SymmetricWindow) -> None:
        size = 2 << 16
        for owner, offset, count in ((0, size - 4, 8), (1, -8, 8), (2, 0, 8), (0, 8, -8), (0, 0, size + 1)):
            with pytest.raises(CommError, match="out of bounds"):
                found.get(owner, offset, count)
        with pytest.raises(CommError, match="a half of symmetric memory 65536"):
            found.allocate(0, (1 << 16) + 1)
        assert found.place(torch.zeros(8)) is None

    run(2, job)


def test_without_a_gpu_all_ranks_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    found = run_threads(2, partial(symmetric.meet, None))  # type: ignore[arg-type]
    assert found == [(None, "symmetric memory needs a GPU")] * 2


def test_the_rendezvous_is_made_as_torch_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    board, this = Board(2), threading.local()
    monkeypatch.setattr(symmetric, "CAPACITY", 1 << 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)

    def empty(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device.type == "cuda"
        this.memory = torch.empty(size, dtype=dtype)
        return this.memory.view(-1)  # what torch counts references of; the board keeps the memory itself

    def rendezvous(x: Tensor, _: Any) -> Any:
        this.owner = ref(x)
        return board.rendezvous(this.memory, this.rank)

    monkeypatch.setattr(symmetric_memory, "empty", empty)
    monkeypatch.setattr(symmetric_memory, "rendezvous", rendezvous)

    def job(base: ThreadComm) -> int:
        this.rank = base.rank
        found, reason = symmetric.meet("the group", base)  # type: ignore[arg-type]
        assert isinstance(found, SymmetricWindow), reason
        assert this.owner() is not None  # else torch would give the memory to the next who asks
        return found.allocate(1, 10).numel()

    assert run_threads(2, job) == [10, 10]
