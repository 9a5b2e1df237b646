"""Supervisor: the process of one launched rank, which starts a child for each attempt and outlives it.

It never touches CUDA and joins no process group, so that no suite can break it. Supervisors communicate by
the launcher's store: rank 0 writes the attempts, all ranks run a child each and write its result.
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
from weft.doctor.child import RENDEZVOUS_SECONDS, STACK_SIGNAL, AttemptSpec, open_store
from weft.run.spawn import pool_rank
from weft.run.spawn.signals import signal_name
from weft.run.world import place

POLL_SECONDS = 0.2
PEER_SECONDS = 3.0
"""For a child to end by itself after a child of another rank has."""
TEARDOWN_SECONDS = 5.0
"""For a child that is done to leave its world."""
STACK_SECONDS = 1.0
"""For a child to write its stacks."""
MAX_READS = 50
KILL_SECONDS = 10.0
RESULT_SECONDS = 20.0
"""Beyond the limit of an attempt, for the results of all ranks."""
MAX_OUTPUT = 16_384
MAX_RESULT = 2_000_000
"""Bytes of one rank's result; a store takes 8 MB."""
STARTED = re.compile(r'(child\.py", line \d+ in run\n)(?:  File .*\n?)+')
MODULES = re.compile(r"^Extension modules: .*\n?", re.MULTILINE)
NUMBERS = re.compile(r"0x[0-9a-f]{6,}")
PRELOAD = ("weft.doctor.child", "weft.run.world", "weft.run.groups", "weft.run.devices")

AttemptEnding = Literal["ok", "failed", "crashed", "hung", "stopped"]
"""How an attempt ended on one rank; stopped: another rank's child ended first."""


@dataclass(kw_only=True)
class AttemptResult:
    """The result of one attempt on one rank."""

    rank: int
    ending: AttemptEnding = "ok"
    message: str = ""
    traceback: str = ""
    under_way: str = ""
    is_in_check: bool = False
    checks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    ended_at: int = 0
    """Nanoseconds of wall time: the first failure is the cause of the others."""


class Supervisors:
    """All supervisors in step, as one of them sees it."""

    def __init__(self) -> None:
        self.rank, self.ranks = place()
        self._store = open_store()
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # children are clients of the same store
        self._count = 0
        self.is_stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: self.is_stopped.set())
        pool_rank.PRELOAD.extend(name for name in PRELOAD if name not in pool_rank.PRELOAD)

    def run_attempt(self, spec: AttemptSpec) -> list[AttemptResult]:
        """Run an attempt on all ranks; return their results, by rank. For rank 0."""
        self._count += 1
        spec = replace(spec, number=self._count)
        self._store.set(f"order {spec.number}", json.dumps(asdict(spec)))
        results = [self._attempt(spec)]
        deadline = time.monotonic() + RESULT_SECONDS
        for rank in range(1, self.ranks):
            text = self._read(f"result {spec.number} {rank}", deadline)
            lost = AttemptResult(rank=rank, ending="crashed", message="its supervisor gave no result")
            results.append(AttemptResult(**json.loads(text)) if text else lost)
        return results

    def end(self) -> None:
        """End the other supervisors. For rank 0."""
        self._count += 1
        self._store.set(f"order {self._count}", "null")

    def follow(self) -> None:
        """Run the attempts that rank 0 orders, until it ends. For the other ranks."""
        while spec := json.loads(self._read(f"order {self._count + 1}") or "null"):
            self._count += 1
            result = self._attempt(AttemptSpec(**spec))
            self._store.set(f"result {self._count} {self.rank}", _bounded(result))

    def share(self, words: list[str]) -> list[str]:
        """Return the private words of all ranks, which no report may contain."""
        self._store.set(f"private {self.rank}", json.dumps(words))
        deadline = time.monotonic() + RENDEZVOUS_SECONDS
        texts = [self._read(f"private {rank}", deadline) for rank in range(self.ranks)]
        return [word for text in texts if text for word in json.loads(text)]

    def _attempt(self, spec: AttemptSpec) -> AttemptResult:
        broken = f"broken {spec.number}"

        def grace() -> float | None:
            if self.is_stopped.is_set():
                return 0.0
            return PEER_SECONDS if self._store.check([broken]) else None

        result = attempt(spec, self.rank, grace)
        if result.ending not in ("ok", "hung"):  # the others reach the same limit, and report their stacks
            self._store.set(broken, "1")
        return result

    def _read(self, key: str, deadline: float | None = None) -> str:
        """Wait for a key; return "" if it is late. Torch's own wait would not notice a signal."""
        while not self._store.check([key]):
            if self.is_stopped.is_set() or (deadline is not None and time.monotonic() > deadline):
                return ""
            time.sleep(0.02)
        return self._store.get(key).decode()


def attempt(spec: AttemptSpec, rank: int, grace: Callable[[], float | None]) -> AttemptResult:
    """Run a child until it ends or its time is up; once `grace` returns seconds, for those at most."""
    deadline, last = time.monotonic() + spec.seconds, "hung"
    running = _Child(spec, rank, deadline)
    try:
        while not running.is_over and (left := deadline - time.monotonic()) > 0:
            running.listen(min(left, POLL_SECONDS))
            if last == "hung" and (seconds := grace()) is not None:
                deadline, last = min(deadline, time.monotonic() + seconds), "stopped"
        if not running.is_over:
            running.dump_stacks()
            running.end("hung" if last == "hung" else "stopped", f"still ran after {spec.seconds:.0f} s")
    finally:
        running.close()
    return running.result


class _Child:
    """A child, as its supervisor sees it."""

    def __init__(self, spec: AttemptSpec, rank: int, deadline: float) -> None:
        self.result, self.is_over, self._output = AttemptResult(rank=rank), False, b""
        pool_rank.start_forkserver()
        self._messages, messages = connection.Pipe(duplex=False)
        self._written, written = connection.Pipe(duplex=False)
        os.set_blocking(self._written.fileno(), False)
        arguments = (spec, deadline, messages, written)
        self._process = get_context("forkserver").Process(target=child.run, args=arguments)
        self._process.start()
        messages.close()
        written.close()
        self._sources: list[Any] = [self._messages, self._written, self._process.sentinel]

    def listen(self, seconds: float) -> None:
        """Handle what arrives within some seconds; the first end counts."""
        ready = connection.wait(self._sources, seconds)
        if self._written in ready:
            self._read()
        if self._messages in ready:
            self._receive()
        elif self._process.sentinel in ready and not self.is_over:
            self._process.join()
            code = self._process.exitcode or 0
            fate = f"exited with code {code}" if code >= 0 else f"was killed by {signal_name(-code)}"
            self.end("crashed", fate)

    def _receive(self) -> None:
        try:
            message = json.loads(self._messages.recv_bytes())
        except (EOFError, OSError):  # the process sentinel reports how it ended
            self._sources.remove(self._messages)
            return
        result = self.result
        if "under_way" in message:
            result.under_way, result.is_in_check = message["under_way"], message.get("is_check", True)
        elif "check" in message:
            result.checks.append(message["check"])
            result.under_way, result.is_in_check = "", False
        elif "failed" in message:
            result.traceback = message["traceback"]
            self.end("failed", message["failed"])
        else:
            result.under_way, result.is_in_check = "", False
            self.end("ok", "")

    def end(self, ending: AttemptEnding, message: str) -> None:
        self.result.ending, self.result.message, self.is_over = ending, message, True
        self.result.ended_at = time.time_ns()

    def dump_stacks(self) -> None:
        """Make the child write its stacks, wherever its threads are blocked."""
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
        """Kill the child and its session, wait for it, and keep the end of its output."""
        if self.result.ending == "ok":
            self._process.join(TEARDOWN_SECONDS)
        assert self._process.pid
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()
        self._process.join(KILL_SECONDS)
        if self._process.exitcode is None:  # inside a driver that does not return
            process._children.discard(self._process)  # type: ignore[attr-defined]  # or our exit would wait
            self.result.message += ", and cannot be killed"
        else:
            self._process.close()
        self._read()
        self._messages.close()
        self._written.close()
        if self.result.ending in ("crashed", "hung", "stopped"):
            self.result.traceback = readable(self._output.decode(errors="replace"))

    def _read(self) -> None:
        with suppress(BlockingIOError, OSError):
            while data := os.read(self._written.fileno(), MAX_OUTPUT):
                self._output = (self._output + data)[-MAX_OUTPUT:]
            self._sources = [source for source in self._sources if source is not self._written]


def readable(text: str) -> str:
    """Return the output of faulthandler without the frames that start a child, addresses and libraries."""
    return NUMBERS.sub("0x…", MODULES.sub("", STARTED.sub(r"\1", text)))


def _bounded(result: AttemptResult) -> str:
    text = json.dumps(asdict(result))
    if len(text) <= MAX_RESULT:
        return text
    short = [{**check, "data": None, "note": check["note"][:100]} for check in result.checks[:1000]]
    return json.dumps(asdict(replace(result, checks=short, traceback=result.traceback[-MAX_OUTPUT:])))
