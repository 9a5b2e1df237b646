"""Watcher: detect late ranks from a thread, and end the call on all ranks.

On CUDA only the stream waits for a peer, so the host does not notice a late one. The calling thread only puts
each posted operation into a queue; the watcher's thread polls the oldest one. When this rank's stream has
waited in it for half of the timeout, the watcher starts a roll call over the group's store, which the
watchers of all ranks answer with their progress. At the timeout the first watcher to get there decides which
rank is late (`rollcall.find_late_rank`). The store accepts one decision: every rank raises the same error and
aborts its communicator.

The error is raised in the threads that have operations under way. It is set before the abort, so that a
thread that is blocked in a synchronize does not go on with the results of an aborted kernel.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakSet

from weft.core.errors import CommError
from weft.run import streams
from weft.run.comm import reason_of
from weft.run.comm.rollcall import Endpoint, RankProgress, find_late_rank, key

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

MAX_POLL_SECONDS = 0.25
MAX_TIMEOUT = 1e6
POLLS = 64
"""Polls of the oldest operation per timeout."""
STORE_POLLS = 8
"""Polls of the store per timeout, for roll calls of other ranks."""
ROLL, VERDICT = "roll", "verdict"
HINT = (
    "It is lost, stuck or in another call; look at its own error first. The group has been aborted: restart "
    "the ranks."
)


class TorchWork(Protocol):
    """The methods of torch's Work that are used here."""

    def is_completed(self) -> bool: ...


class Operation(NamedTuple):
    """A post under way: its works, and the event of this rank's stream that precedes them."""

    works: Sequence[TorchWork]
    event: streams.Event
    label: str
    messages: list[Endpoint]
    timeout: float
    thread: int


_watchers: WeakSet[Watcher] = WeakSet()


class Watcher:
    """Watch the operations of one rank in one process group."""

    def __init__(self, store: Store, rank: int, members: Sequence[int], abort: Callable[[], None]) -> None:
        """`members` are the global ranks of the group, which errors name."""
        self.rank, self.members = rank, members
        self.failure: Callable[[], CommError] | None = None
        """The error that each call raises, once the group has failed."""
        self.timeout = float("inf")
        """The shortest of those passed to `start`."""
        self.on_failure: list[Callable[[], None]] = []
        """Called when the group has failed, before its communicator is aborted."""
        self._store, self._abort = store, abort
        self._posted: deque[Operation] = deque()
        """From the calling threads to this one."""
        self._under_way: deque[Operation] = deque()
        self._started = 0
        """How many of those under way this rank's stream has reached."""
        self._counts: Counter[str] = Counter()
        self._since: float | None = None
        """When the stream began to wait for the oldest one."""
        self._last = ""
        self._roll, self._called, self._polled = 0, float("-inf"), float("-inf")
        self._awaited: int | None = None
        """The roll call whose answers this rank decides by."""
        self._answer: RankProgress | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, timeout: float) -> None:
        """Answer roll calls from now on, and poll as often as `timeout` needs."""
        self.timeout = min(self.timeout, timeout, MAX_TIMEOUT)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft-watcher", daemon=True)
            _watchers.add(self)
            self._thread.start()

    def watch(
        self,
        works: Sequence[TorchWork],
        event: streams.Event,
        label: str,
        messages: list[Endpoint],
        timeout: float,
    ) -> None:
        self._posted.append(Operation(works, event, label, messages, timeout, threading.get_ident()))
        self.check()

    def check(self) -> None:
        """Raise the error of the group, if it has failed."""
        if self.failure is not None:
            raise self.failure()

    def close(self) -> None:
        self._over.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2.0)

    def _run(self) -> None:
        streams.ignore_captures()
        while not self._over.wait(min(MAX_POLL_SECONDS, self.timeout / POLLS)):
            self.tick(time.monotonic())

    def tick(self, now: float) -> None:
        """Poll the operations under way, and the store if it is due."""
        waiting = self._advance(now)
        waited = 0.0 if self._since is None else now - self._since
        try:
            self._poll_store(now, waiting, waited)
        except Exception as error:  # whatever a store raises: it is lost with the rank that hosts it
            if waiting is not None and waited > waiting.timeout:
                self._fail(
                    f"Rank {self.members[self.rank]} waited {waited:.1f} s in {waiting.label}, and the store "
                    f"does not answer: the rank that serves it, usually rank 0, is lost ({reason_of(error)})."
                )

    def _advance(self, now: float) -> Operation | None:
        """Drop what has ended; return the operation that this rank's stream waits in, if any."""
        self._collect()
        operations = self._under_way
        while operations and all(work.is_completed() for work in operations[0].works):
            if self._started:
                self._started -= 1
            else:
                self._counts.update(map(key, operations[0].messages))
            self._since = self._awaited = None
            self._last = operations.popleft().label
        for operation in islice(operations, self._started, None):
            if not operation.event.query():
                break
            self._counts.update(map(key, operation.messages))
            self._started += 1
        if not self._started:
            return None
        self._since = now if self._since is None else self._since
        return operations[0]

    def _collect(self) -> None:
        while self._posted:
            self._under_way.append(self._posted.popleft())

    def _poll_store(self, now: float, waiting: Operation | None, waited: float) -> None:
        """Start a roll call, answer those of others, decide, and act on a decision."""
        half = self.timeout / 2
        if waiting is not None and self._awaited is None and waited >= waiting.timeout - half:
            if self._called < now - waited:  # no roll call since
                self._roll, self._called = self._store.add(ROLL, 1), now
            self._awaited = self._roll
        is_alarmed = now - self._called < self.timeout
        if is_alarmed or now - self._polled >= self.timeout / STORE_POLLS:
            self._polled = now
            roll = self._store.add(ROLL, 0)
            if roll > self._roll:
                self._roll, self._called, is_alarmed = roll, now, True
        if not is_alarmed:
            return
        answer = self._answer_now(waiting)
        if answer != self._answer:
            self._answer = answer
            self._store.set(f"answer {self.rank}", json.dumps(asdict(answer)))
        if waiting is not None and self._awaited is not None and waited >= waiting.timeout:
            late, message = find_late_rank(self._answers(self._awaited), waiting.label, waited, self.members)
            self._store.compare_set(VERDICT, "", json.dumps([late, message]))
        if self._store.check([VERDICT]):
            self._fail(json.loads(self._store.get(VERDICT))[1])

    def _answer_now(self, waiting: Operation | None) -> RankProgress:
        waits: dict[str, int] = {}
        label = self._under_way[-1].label if self._under_way else self._last
        if waiting is not None:
            label = waiting.label
            later = (each.messages for each in islice(self._under_way, 1, self._started))
            counts = self._counts - Counter(key(message) for messages in later for message in messages)
            waits = {key(message): counts[key(message)] for message in waiting.messages}
        return RankProgress(
            self._roll, dict(self._counts), waits, label, len(self._under_way) - self._started
        )

    def _answers(self, call: int) -> list[RankProgress | None]:
        """Return each rank's answer to a roll call, or to a later one."""
        answers: list[RankProgress | None] = []
        for rank in range(len(self.members)):
            name = f"answer {rank}"
            answer = RankProgress(**json.loads(self._store.get(name))) if self._store.check([name]) else None
            answers.append(answer if answer is not None and answer.call >= call else None)
        return answers

    def _fail(self, message: str) -> None:
        failure = _error(message)
        ended = self._interrupt(failure, set())
        self.failure = failure
        self._interrupt(failure, ended)  # what was posted in between; later posts see the failure
        for end in (*self.on_failure, self._abort):
            with suppress(Exception):  # of a communicator that is gone already
                end()
        self._over.set()

    def _interrupt(self, failure: Callable[[], CommError], done: set[int]) -> set[int]:
        """Raise the failure in each thread that has operations under way."""
        self._collect()
        threads = {operation.thread for operation in self._under_way}
        dummies = threading._DummyThread  # pyright: ignore[reportAttributeAccessIssue]
        own = {thread.ident for thread in threading.enumerate() if not isinstance(thread, dummies)}
        if threads - own:  # autograd posts from threads of its own; the main thread uses what they compute
            threads.add(threading.main_thread().ident or 0)
        threads -= {*done, threading.get_ident()}  # this thread may have the number of one that has ended
        for thread in threads:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(failure))
        return threads | done


def _error(message: str) -> Callable[[], CommError]:
    """Return an error class, since a thread can be interrupted by classes only."""

    class LateRankError(CommError):
        def __init__(self) -> None:
            super().__init__(message, hint=HINT)

        def __reduce__(self) -> tuple[object, ...]:
            return CommError(message, hint=HINT).__reduce__()

    return LateRankError


@atexit.register
def _close_all() -> None:
    """End all watchers before the interpreter does: stopping a thread inside a store would abort it."""
    watchers = list(_watchers)
    for watcher in watchers:
        watcher._over.set()  # pyright: ignore[reportPrivateUsage]
    for watcher in watchers:
        watcher.close()
