"""Pool: local ranks that run functions, in processes that live for many runs.

    with Pool(3) as pool:
        pool.run(fn, x)                                   # fn(x) on ranks 0, 1, 2 -> their results
        pool.run(fn, x, per_rank=[(0,), (1,), (2,)])      # fn(x, 0), fn(x, 1), fn(x, 2)

What `fn` leaves behind in a rank (seeds, caches, groups) is there in the next run. A run that fails ends its
ranks, and the next one starts fresh ones.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import inf
from multiprocessing import connection, util
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from weft.core.errors import CommError, InputError, WeftError
from weft.run.net.scratch import make_scratch
from weft.run.spawn.pool_rank import (
    STACK_REQUEST,
    Answer,
    CallFailure,
    Returned,
    barrier,
    call,
    end_ranks,
    get_ready,
    join_world,
    start_ranks,
)
from weft.run.spawn.signals import signal_name

__all__ = ["CallFailure", "Pool", "RankFailure"]

REPLY_SECONDS = 5.0  # beyond the process group's time-out, for a rank to report what went wrong
STACK_SECONDS = 3.0  # a rank on a crowded machine needs a while for a few lines of Python
CLOSED = CallFailure(kind="exited", message="closed its pipe")
START_HINT = '\nRanks import the main module: start pools in a file, under if __name__ == "__main__".'


class RankFailure(CommError):  # noqa: N818 - described by its `failures`
    """A run that failed on some ranks; `failures` maps each to what happened, earliest first."""

    def __init__(self, failures: dict[int, CallFailure], size: int, hint: str = "") -> None:
        lines = [failure.line(rank) for rank, failure in failures.items()]
        super().__init__("\n  ".join([f"{len(lines)} of {size} ranks failed:", *lines]), hint=hint)
        self.failures = failures
        self.size = size
        rank, first = next(iter(failures.items()))
        if first.traceback and sys.version_info >= (3, 11):
            self.add_note(f"rank {rank} was here:\n{first.traceback}")

    def __reduce__(self) -> tuple[object, ...]:
        return RankFailure, (self.failures, self.size, self.hint)


class Pool:
    """`size` local ranks in one process group, ready when the constructor returns.

    `timeout` is that of the process group. `limit` bounds a whole run; without one, a run in which
    no rank fails takes as long as it needs. `transport` is WEFT_TRANSPORT, by default this process's.
    """

    def __init__(
        self,
        size: int,
        *,
        threads: int = 1,
        timeout: float = 30.0,
        limit: float | None = None,
        transport: str = "",
    ) -> None:
        if size < 1 or threads < 1:
            raise InputError(f"size and threads must be > 0, got {size} and {threads}.")
        self.size = size
        self.threads = threads
        self.transport = transport or os.environ.get("WEFT_TRANSPORT", "auto")
        self.timeout = timeout
        self.limit = inf if limit is None else limit
        self._closed = False
        self._busy = False
        self._ranks: _Ranks | None = self._fresh_ranks()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids by rank; empty after a failure, until the next run starts fresh ranks."""
        return () if self._ranks is None else self._ranks.pids

    def run(
        self, fn: Callable[..., Any], *args: Any, per_rank: Sequence[Sequence[Any]] | None = None
    ) -> list[Any]:
        """Return the results of `fn(*args, *per_rank[rank])` by rank, or raise RankFailure."""
        self.start(fn, *args, per_rank=per_rank)
        return self.finish()

    def start(
        self, fn: Callable[..., Any], *args: Any, per_rank: Sequence[Sequence[Any]] | None = None
    ) -> None:
        """Start a run and return while the ranks work; `finish` waits for them."""
        if self._closed or self._busy:
            state = "is closed" if self._closed else "has a run under way: call finish() first"
            raise InputError(f"cannot start {fn}: this pool {state}.")
        if per_rank is not None and len(per_rank) != self.size:
            raise InputError(f"per_rank has {len(per_rank)} entries for {self.size} ranks.")
        if per_rank is None:
            calls = [call(fn, *args)] * self.size
        else:
            calls = [call(fn, *args, *own) for own in per_rank]
        if self._ranks is None:
            self._ranks = self._fresh_ranks()
        self._busy = True
        with self._ended_on_error():
            self._ranks.send(calls)

    def finish(self) -> list[Any]:
        """Wait for the ranks of the run that `start` began, and return their results."""
        if self._ranks is None or not self._busy:
            raise InputError("nothing to finish: start() a run first.")
        with self._ended_on_error():
            answers = self._ranks.collect(self.timeout + REPLY_SECONDS, self.limit)
            failures = failures_in(answers)
            if failures and not self._in_step(self._ranks, failures):
                self._end_ranks()
        self._busy = False
        if failures:
            raise RankFailure(failures, self.size)
        returned = {rank: a.value for rank, a in answers.items() if isinstance(a, Returned)}
        return [returned[rank] for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks; a second call does nothing."""
        self._closed = True
        self._end_ranks()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fresh_ranks(self) -> _Ranks:
        ranks = _Ranks(self.size)
        try:
            ranks.start()
            for phase, calls in enumerate(self._first_calls(ranks.directory)):
                ranks.send(calls)
                if failures := failures_in(ranks.collect(self.timeout + REPLY_SECONDS, inf)):
                    raise RankFailure(failures, self.size, "" if phase else START_HINT)
        except BaseException:
            ranks.end(grace=False)
            raise
        return ranks

    def _first_calls(self, directory: str) -> list[list[bytes]]:
        """Return the calls of fresh ranks, in phases: all import torch before the time-out of joining."""
        ready, world = (self.size, self.threads, self.transport), (self.size, self.timeout, directory)
        return [
            [call(get_ready, rank, *ready) for rank in range(self.size)],
            [call(join_world, rank, *world) for rank in range(self.size)],
        ]

    def _in_step(self, ranks: _Ranks, failures: dict[int, CallFailure]) -> bool:
        """Return whether every rank refused its call, as weft does before any message, and can go on.

        Any other failure may leave messages behind that the next run would receive as its own.
        """
        refused = [
            isinstance(failure.error, WeftError) and not isinstance(failure.error, CommError)
            for failure in failures.values()
        ]
        if len(refused) < self.size or not all(refused):
            return False
        ranks.send([call(barrier, self.timeout)] * self.size)
        return not failures_in(ranks.collect(0.0, self.timeout))

    @contextmanager
    def _ended_on_error(self) -> Generator[None]:
        try:
            yield
        except BaseException:  # Ctrl-C above all
            self._end_ranks()
            raise

    def _end_ranks(self) -> None:
        ranks, busy = self._ranks, self._busy
        self._ranks, self._busy = None, False
        if ranks is not None:
            ranks.end(grace=not busy)


class _Ranks:
    """One set of processes and the pipes to them: never repaired, only replaced."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._sent_at = 0.0
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        folder, self._lock = make_scratch("pool")
        self.directory = str(folder)
        # multiprocessing's finalizer and not weakref's: at exit it runs before multiprocessing
        # joins its children, which would wait for ever for ranks that are still running.
        owned = (self._processes, self._pipes, self.directory)
        self._finalizer = util.Finalize(self, end_ranks, owned, {"grace": False}, exitpriority=10)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid or 0 for process in self._processes)

    def start(self) -> None:
        for process, pipe in start_ranks(self._size, self.directory):
            self._processes.append(process)
            self._pipes.append(pipe)

    def send(self, messages: Sequence[bytes]) -> None:
        self._sent_at = time.monotonic()
        for pipe, message in zip(self._pipes, messages, strict=True):
            with suppress(OSError):  # a dead rank: `collect` reports how it died
                pipe.send_bytes(message)

    def collect(self, patience: float, limit: float) -> dict[int, Answer]:
        """Return the answer of every rank, in order of arrival.

        After the first failure, the other ranks have `patience` seconds to end by themselves. The exit status
        of a rank has as long from the moment that its pipe closes.
        """
        answers: dict[int, Answer] = {}
        self._gather(answers, time.monotonic() + limit, patience)
        late = [rank for rank in range(self._size) if rank not in answers]
        for rank in late:
            with suppress(OSError):
                self._pipes[rank].send_bytes(STACK_REQUEST)
        self._gather(answers, time.monotonic() + STACK_SECONDS, STACK_SECONDS)
        for rank in late:
            # A rank that answers now also answers STACK_REQUEST, so its pipe is no longer in step.
            if not isinstance(answers.get(rank), CallFailure):
                message = "answered too late" if rank in answers else "gave no sign of life"
                seconds = time.monotonic() - self._sent_at
                answers[rank] = CallFailure(kind="stuck", message=message, seconds=seconds)
        for rank, answer in answers.items():
            if isinstance(answer, CallFailure) and answer.kind == CLOSED.kind:
                answers[rank] = self._with_exit_status(rank, answer, patience)
        return answers

    def _gather(self, answers: dict[int, Answer], deadline: float, patience: float) -> None:
        while waiting := [rank for rank in range(self._size) if rank not in answers]:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            sources: dict[Any, int] = {self._pipes[rank]: rank for rank in waiting}
            sources |= {self._processes[rank].sentinel: rank for rank in waiting}
            ready = connection.wait(sources, timeout=None if left == inf else left)
            arrived = {rank: self._receive(rank) for rank in {sources[source] for source in ready}}
            # A dead rank first: the others may already report the loss of this peer.
            for rank, answer in sorted(arrived.items(), key=lambda pair: pair[1] is not CLOSED):
                if isinstance(answer, CallFailure):
                    now = time.monotonic()
                    answer = replace(answer, seconds=now - self._sent_at)
                    deadline = min(deadline, now + patience)
                answers[rank] = answer

    def _receive(self, rank: int) -> Answer:
        try:
            # A rank that died may have answered first.
            answer = self._pipes[rank].recv_bytes() if self._pipes[rank].poll() else b""
        except (EOFError, OSError):
            answer = b""
        if not answer:
            return CLOSED
        try:
            return pickle.loads(answer)
        except Exception as error:
            return CallFailure.of(error)

    def _with_exit_status(self, rank: int, closed: CallFailure, patience: float) -> CallFailure:
        """Add the exit status to `closed`; the forkserver may send it seconds after the pipe closes."""
        deadline = self._sent_at + closed.seconds + patience
        self._processes[rank].join(max(0.0, deadline - time.monotonic()))
        code = self._processes[rank].exitcode
        if code is not None and code < 0:
            return replace(closed, kind="killed", message=f"was killed by {signal_name(-code)}")
        return closed if code is None else replace(closed, message=f"exited with code {code}")

    def end(self, *, grace: bool) -> None:
        self._finalizer.cancel()
        end_ranks(self._processes, self._pipes, self.directory, grace=grace)
        os.close(self._lock)


def failures_in(answers: dict[int, Answer]) -> dict[int, CallFailure]:
    return {rank: answer for rank, answer in answers.items() if isinstance(answer, CallFailure)}
