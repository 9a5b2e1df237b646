"""Keeper: the process of one launched rank, which starts a child for each attempt and outlives it.

It never touches CUDA and is in no process group, so that nothing which a part breaks can break it. Keepers
meet in the launcher's store: rank 0 gives orders, all ranks run a child each, and each gives its account.
"""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import connection, get_context, process
from typing import Any, Literal

from weft.doctor import child
from weft.doctor.child import MEETING_SECONDS, STACK_SIGNAL, Order, open_store
from weft.run import rank as fork
from weft.run.world import place

POLL_SECONDS = 0.2
PEER_SECONDS = 3.0
"""For a child to end by itself after a child of another rank has."""
TEARDOWN_SECONDS = 5.0
"""For a child that is through to leave its world."""
STACK_SECONDS = 1.0
"""For a child to write where it is."""
MAX_READS = 50
KILL_SECONDS = 10.0
ACCOUNT_SECONDS = 20.0
"""Beyond the limit of an order, for the accounts of all ranks."""
MAX_OUTPUT = 16_384
MAX_ACCOUNT = 2_000_000
"""Bytes, of what one rank says of one attempt; a store takes 8 MB."""
STARTED = re.compile(r'(child\.py", line \d+ in run\n)(?:  File .*\n?)+')
MODULES = re.compile(r"^Extension modules: .*\n?", re.MULTILINE)
NUMBERS = re.compile(r"0x[0-9a-f]{6,}")
PRELOAD = ("weft.doctor.child", "weft.run.world", "weft.run.groups", "weft.run.devices")

How = Literal["ok", "failed", "crashed", "hung", "stopped"]
"""How an attempt ended on one rank; stopped: another rank's child ended first."""


@dataclass(kw_only=True)
class Account:
    """What one attempt came to on one rank."""

    rank: int
    how: How = "ok"
    message: str = ""
    traceback: str = ""
    under_way: str = ""
    is_in_check: bool = False
    checks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ended_at: int = 0
    """Nanoseconds, by the clock on the wall: what failed first is the cause of the rest."""


class Keepers:
    """All keepers in step, as one of them sees it."""

    def __init__(self) -> None:
        self.rank, self.ranks = place()
        self._store = open_store()
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # children are clients of the same store
        self._count = 0
        self.is_stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.is_stopped.set())
        fork.PRELOAD.extend(name for name in PRELOAD if name not in fork.PRELOAD)

    def ask(self, order: Order) -> list[Account]:
        """Have all ranks try; return their accounts, by rank. For rank 0."""
        self._count += 1
        order = replace(order, number=self._count)
        self._store.set(f"order {order.number}", json.dumps(asdict(order)))
        accounts = [self._attempt(order)]
        deadline = time.monotonic() + ACCOUNT_SECONDS
        for rank in range(1, self.ranks):
            text = self._read(f"account {order.number} {rank}", deadline)
            lost = Account(rank=rank, how="crashed", message="its keeper gave no account")
            accounts.append(Account(**json.loads(text)) if text else lost)
        return accounts

    def end(self) -> None:
        """Let the other keepers end. For rank 0."""
        self._count += 1
        self._store.set(f"order {self._count}", "null")

    def follow(self) -> None:
        """Do what rank 0 orders, until there is nothing left. For the other ranks."""
        while order := json.loads(self._read(f"order {self._count + 1}") or "null"):
            self._count += 1
            account = self._attempt(Order(**order))
            self._store.set(f"account {self._count} {self.rank}", _bounded(account))

    def share(self, words: list[str]) -> list[str]:
        """Return what all keepers know that no report may say."""
        self._store.set(f"private {self.rank}", json.dumps(words))
        deadline = time.monotonic() + MEETING_SECONDS
        texts = [self._read(f"private {rank}", deadline) for rank in range(self.ranks)]
        return [word for text in texts if text for word in json.loads(text)]

    def _attempt(self, order: Order) -> Account:
        broken = f"broken {order.number}"

        def grace() -> float | None:
            if self.is_stopped.is_set():
                return 0.0
            return PEER_SECONDS if self._store.check([broken]) else None

        account = attempt(order, self.rank, grace)
        if account.how not in ("ok", "hung"):  # the others reach the same limit, and tell where they are
            self._store.set(broken, "1")
        return account

    def _read(self, key: str, deadline: float | None = None) -> str:
        """Wait for a key; nothing if it does not come in time. Torch's own wait would not hear a signal."""
        while not self._store.check([key]):
            if self.is_stopped.is_set() or (deadline is not None and time.monotonic() > deadline):
                return ""
            time.sleep(0.02)
        return self._store.get(key).decode()


def attempt(order: Order, rank: int, grace: Callable[[], float | None]) -> Account:
    """Run a child to its end or its limit, or, once `grace` gives some seconds, for no longer than those."""
    deadline, last = time.monotonic() + order.seconds, "hung"
    running = _Child(order, rank, deadline)
    try:
        while not running.is_over and (left := deadline - time.monotonic()) > 0:
            running.listen(min(left, POLL_SECONDS))
            if last == "hung" and (seconds := grace()) is not None:
                deadline, last = min(deadline, time.monotonic() + seconds), "stopped"
        if not running.is_over:
            running.dump_stacks()
            running.end("hung" if last == "hung" else "stopped", f"still ran after {order.seconds:.0f} s")
    finally:
        running.close()
    return running.account


class _Child:
    """A child, as its keeper hears it."""

    def __init__(self, order: Order, rank: int, deadline: float) -> None:
        self.account, self.is_over, self._output = Account(rank=rank), False, b""
        fork.start_forkserver()
        self._messages, messages = connection.Pipe(duplex=False)
        self._written, written = connection.Pipe(duplex=False)
        os.set_blocking(self._written.fileno(), False)
        arguments = (order, deadline, messages, written)
        self._process = get_context("forkserver").Process(target=child.run, args=arguments)
        self._process.start()
        messages.close()
        written.close()
        self._sources: list[Any] = [self._messages, self._written, self._process.sentinel]

    def listen(self, seconds: float) -> None:
        """Take what comes within some seconds; an end is final."""
        ready = connection.wait(self._sources, seconds)
        if self._written in ready:
            self._read()
        if self._messages in ready:
            self._hear()
        elif self._process.sentinel in ready and not self.is_over:
            self._process.join()
            code = self._process.exitcode or 0
            fate = f"exited with code {code}" if code >= 0 else f"was killed by {_signal(-code)}"
            self.end("crashed", fate)

    def _hear(self) -> None:
        try:
            message = json.loads(self._messages.recv_bytes())
        except (EOFError, OSError):  # the sentinel tells how it ended
            self._sources.remove(self._messages)
            return
        account = self.account
        if "under_way" in message:
            account.under_way, account.is_in_check = message["under_way"], message.get("is_check", True)
        elif "check" in message:
            account.checks.append(message["check"])
            account.under_way, account.is_in_check = "", False
        elif "failed" in message:
            account.traceback = message["traceback"]
            self.end("failed", message["failed"])
        else:
            account.under_way, account.is_in_check = "", False
            self.end("ok", "")

    def end(self, how: How, message: str) -> None:
        self.account.how, self.account.message, self.is_over = how, message, True
        self.account.ended_at = time.time_ns()

    def dump_stacks(self) -> None:
        """Have the child write where its threads are, which works wherever they are blocked."""
        assert self._process.pid
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, STACK_SIGNAL)
        seconds = STACK_SECONDS
        for _ in range(MAX_READS):
            if not connection.wait([self._written], seconds):
                break
            self._read()
            seconds = STACK_SECONDS / 10

    def close(self) -> None:
        """See the child gone, with all that it has started, and keep the end of what it wrote."""
        if self.account.how == "ok":
            self._process.join(TEARDOWN_SECONDS)
        assert self._process.pid
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(KILL_SECONDS)
        if self._process.exitcode is None:  # inside a driver that does not return
            process._children.discard(self._process)  # type: ignore[attr-defined]  # or our exit would wait
            self.account.message += ", and cannot be killed"
        else:
            self._process.close()
        self._read()
        self._messages.close()
        self._written.close()
        if self.account.how in ("crashed", "hung", "stopped"):
            self.account.traceback = readable(self._output.decode(errors="replace"))

    def _read(self) -> None:
        with suppress(BlockingIOError, OSError):
            while data := os.read(self._written.fileno(), MAX_OUTPUT):
                self._output = (self._output + data)[-MAX_OUTPUT:]
            self._sources = [source for source in self._sources if source is not self._written]


def readable(text: str) -> str:
    """Return what faulthandler wrote without how a child is started, numbers of threads and all libraries."""
    return NUMBERS.sub("0x…", MODULES.sub("", STARTED.sub(r"\1", text)))


def _signal(number: int) -> str:
    names = {each.value: each.name for each in signal.Signals}
    return names.get(number, f"signal {number}")


def _bounded(account: Account) -> str:
    text = json.dumps(asdict(account))
    if len(text) <= MAX_ACCOUNT:
        return text
    short = [{**check, "data": None, "note": check["note"][:100]} for check in account.checks[:1000]]
    return json.dumps(asdict(replace(account, checks=short, traceback=account.traceback[-MAX_OUTPUT:])))
