"""Watcher: find out, beside the calls, that a rank is late, and end the call on all ranks.

On CUDA a wait is a wait of the stream, so the host never learns that a peer does not come. Posting puts an
operation into a queue, and that is all that the calling thread does for it. The watcher's thread polls the
oldest operation. When this rank's stream has waited in it for half of the time-out, the watcher calls the
roll over the group's store; the watchers of all ranks answer how far they are, also where nothing is under
way. At the time-out the first watcher that gets there decides which rank is late (`rollcall.verdict`). The
store takes one decision only: every rank raises an error with the same words, and aborts its communicator.

The error is raised in the threads whose operations are under way, whatever they do. It is set before the
abort, so that a thread which is blocked in a synchronize does not go on with what an aborted kernel has
left.
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
from itertools import islice
from typing import Any, NamedTuple, Protocol
from weakref import WeakSet

from weft.core.errors import CommError
from weft.run import streams
from weft.run.comm.rollcall import Answer, Message, key, verdict

MAX_POLL_SECONDS = 0.25
MAX_TIMEOUT = 1e6
POLLS = 64
"""Polls of the oldest operation in a time-out."""
LOOKS = 8
"""Looks into the store in a time-out, for the roll calls of others."""
ROLL, VERDICT = "roll", "verdict"
HINT = (
    "It is lost, stuck or in another call; look at its own error first. The group has been aborted: start "
    "the ranks again."
)


class Work(Protocol):
    """The part of torch's Work that is used here."""

    def is_completed(self) -> bool: ...


class Store(Protocol):
    """The part of torch's Store that is used here."""

    def add(self, key: str, amount: int) -> int: ...
    def set(self, key: str, value: str) -> Any: ...
    def get(self, key: str) -> bytes: ...
    def check(self, keys: list[str]) -> bool: ...
    def compare_set(self, key: str, expected_value: str, desired_value: str) -> bytes: ...


class Operation(NamedTuple):
    """A post that is under way: its works, and the event of this rank's stream that they begin behind."""

    works: Sequence[Work]
    event: streams.Event
    label: str
    messages: list[Message]
    timeout: float
    thread: int


_watchers: WeakSet[Watcher] = WeakSet()


class Watcher:
    """One rank's watcher of the operations of one process group."""

    def __init__(self, store: Store, rank: int, members: Sequence[int], abort: Callable[[], None]) -> None:
        """`members` are the ranks of the group as the world counts them: messages name ranks so."""
        self.rank, self.members = rank, members
        self.failure: Callable[[], CommError] | None = None
        """Once the group has failed: what each call raises."""
        self.timeout = float("inf")
        """The shortest of those that were asked for."""
        self.on_failure: list[Callable[[], None]] = []
        """What else must end when the group has failed; called before its communicator is aborted."""
        self._store, self._abort = store, abort
        self._posted: deque[Operation] = deque()
        """What the calling threads leave for this one."""
        self._under_way: deque[Operation] = deque()
        self._started = 0
        """Of those under way, how many this rank's stream has come to."""
        self._counts: Counter[str] = Counter()
        self._since: float | None = None
        """When the stream began to wait for the oldest of them."""
        self._last = ""
        self._roll, self._called, self._looked = 0, float("-inf"), float("-inf")
        self._awaited: int | None = None
        """The roll call that must have been answered before this rank may decide."""
        self._answer: Answer | None = None
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, timeout: float) -> None:
        """Answer roll calls from now on, and look as often as `timeout` needs."""
        self.timeout = min(self.timeout, timeout, MAX_TIMEOUT)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="weft-watcher", daemon=True)
            _watchers.add(self)
            self._thread.start()

    def watch(
        self, works: Sequence[Work], event: streams.Event, label: str, messages: list[Message], timeout: float
    ) -> None:
        self._posted.append(Operation(works, event, label, messages, timeout, threading.get_ident()))
        self.check()

    def check(self) -> None:
        """Raise what ended the group, if something did."""
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
        """Look at what is under way, and at the store if it is time to."""
        waiting = self._advance(now)
        waited = 0.0 if self._since is None else now - self._since
        try:
            self._look(now, waiting, waited)
        except Exception as error:  # whatever a store raises: it is lost with the rank that serves it
            if waiting is not None and waited > waiting.timeout:
                text = str(error).splitlines()[0] if str(error) else type(error).__name__
                self._fail(
                    f"Rank {self.members[self.rank]} waited {waited:.1f} s in {waiting.label}, and the store "
                    f"does not answer: the rank that serves it, usually rank 0, is lost ({text})."
                )

    def _advance(self, now: float) -> Operation | None:
        """Drop what has ended; the operation that this rank's stream waits in, if any."""
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

    def _look(self, now: float, waiting: Operation | None, waited: float) -> None:
        """Call the roll, answer those of others, decide, and obey what was decided."""
        half = self.timeout / 2
        if waiting is not None and self._awaited is None and waited >= waiting.timeout - half:
            if self._called < now - waited:  # nobody has called it since
                self._roll, self._called = self._store.add(ROLL, 1), now
            self._awaited = self._roll
        is_alarmed = now - self._called < self.timeout
        if is_alarmed or now - self._looked >= self.timeout / LOOKS:
            self._looked = now
            roll = self._store.add(ROLL, 0)
            if roll > self._roll:
                self._roll, self._called, is_alarmed = roll, now, True
        if not is_alarmed:
            return
        answer = self._answer_now(waiting)
        if answer != self._answer:
            self._answer = answer
            self._store.set(f"answer {self.rank}", json.dumps(answer.to_plain()))
        if waiting is not None and self._awaited is not None and waited >= waiting.timeout:
            late, message = verdict(self._answers(self._awaited), waiting.label, waited, self.members)
            self._store.compare_set(VERDICT, "", json.dumps([late, message]))
        if self._store.check([VERDICT]):
            self._fail(json.loads(self._store.get(VERDICT))[1])

    def _answer_now(self, waiting: Operation | None) -> Answer:
        waits: dict[str, int] = {}
        label = self._under_way[-1].label if self._under_way else self._last
        if waiting is not None:
            label = waiting.label
            later = (each.messages for each in islice(self._under_way, 1, self._started))
            counts = self._counts - Counter(key(message) for messages in later for message in messages)
            waits = {key(message): counts[key(message)] for message in waiting.messages}
        return Answer(self._roll, dict(self._counts), waits, label, len(self._under_way) - self._started)

    def _answers(self, call: int) -> list[Answer | None]:
        """What each rank has said to a roll call, or to a later one."""
        answers: list[Answer | None] = []
        for rank in range(len(self.members)):
            name = f"answer {rank}"
            answer = Answer(**json.loads(self._store.get(name))) if self._store.check([name]) else None
            answers.append(answer if answer is not None and answer.call >= call else None)
        return answers

    def _fail(self, message: str) -> None:
        failure = _error(message)
        ended = self._interrupt(failure, set())
        self.failure = failure
        self._interrupt(failure, ended)  # what was posted in between; what comes now sees the failure
        for end in (*self.on_failure, self._abort):
            with suppress(Exception):  # a communicator that is gone already
                end()
        self._over.set()

    def _interrupt(self, failure: Callable[[], CommError], done: set[int]) -> set[int]:
        """Raise in each thread that has something under way."""
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
    """A class, since a thread can be interrupted by classes only; its instances are errors like others."""

    class LateRankError(CommError):
        def __init__(self) -> None:
            super().__init__(message, hint=HINT)

        def __reduce__(self) -> tuple[object, ...]:
            return CommError(message, hint=HINT).__reduce__()

    return LateRankError


@atexit.register
def _close_all() -> None:
    """End all watchers before the interpreter ends: a thread that it stops inside a store would abort it."""
    for watcher in list(_watchers):
        watcher._over.set()  # pyright: ignore[reportPrivateUsage]
    for watcher in list(_watchers):
        watcher.close()
