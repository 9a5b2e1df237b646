"""Launch: a script on several ranks, supervised, with one outcome instead of N tracebacks.

Ranks find each other as under torchrun, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Their store listens
on loopback only; ranks of other machines reach it through `weft.run.nodes`.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from weft.run import network
from weft.run.listener import listen
from weft.run.nodes import Group, Nodes, Outcome, join
from weft.run.scratch import scratch

__all__ = ["Nodes", "Outcome", "launch", "usable_cores"]

GRACE_SECONDS = 10
"""From Ctrl-C or SIGTERM to SIGKILL."""
FAILURE_GRACE_SECONDS = 10
"""From the first failure to the SIGKILL of ranks that still run: they have lost a peer and cannot finish."""
POLL_SECONDS = 0.05
"""Where the system has no descriptors of processes."""
MAX_REPORT = 100_000
"""Characters of a rank's traceback."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(
    command: Sequence[str], ranks: int, nodes: Nodes | None = None, *, grace: float | None = None
) -> Outcome:
    """Run a script, or -m and a module, on `ranks` processes here; return when all of them have ended.

    `grace` is the time from Ctrl-C to SIGKILL. The first rank that fails ends the others, on all machines.
    """
    nodes, grace = nodes or Nodes(), GRACE_SECONDS if grace is None else grace
    with ExitStack() as stack:
        folder = stack.enter_context(scratch("run"))
        store = stack.enter_context(listen(("127.0.0.1", 0))) if nodes.node == 0 else None
        group = stack.enter_context(join(nodes, ranks, store.getsockname()[1] if store else 0, folder))
        pressed = stack.enter_context(_signals())
        environment = os.environ | _environment(ranks, nodes, group)
        workers: list[_Worker] = []
        for local in range(ranks):
            workers.append(_Worker(command, local, environment, group, folder))
            stack.callback(workers[-1].end)
        # After the ranks: they import torch while this process does.
        server = _serve_store(store) if store else None
        outcome = _Supervisor(workers, group, pressed, grace).run()
        del server
        return outcome


def _environment(ranks: int, nodes: Nodes, group: Group) -> dict[str, str]:
    """Return the variables of all ranks here; those that the user may have set are not replaced."""
    soft = {"OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)), **network.environment(nodes.interface)}
    soft["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "1"
    return soft | {name: os.environ[name] for name in soft if os.environ.get(name)} | {
        "WORLD_SIZE": str(group.world), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": str(nodes.node),
        "GROUP_WORLD_SIZE": str(nodes.count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(group.port),
        # torch: the launcher has the store, and rank 0 is to open none.
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": group.run_id,
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "WEFT_LAUNCHER": str(os.getpid()),
    }  # fmt: skip


def _serve_store(listening: socket.socket) -> Any:
    from weft.run.stores import serve_store

    return serve_store(listening)


class _Worker:
    """The process of one rank, in a session of its own: the launcher alone gets Ctrl-C and passes it on."""

    def __init__(
        self, command: Sequence[str], local: int, environment: Mapping[str, str], group: Group, folder: Path
    ) -> None:
        self.rank, self.error_file = group.first + local, folder / f"rank{group.first + local}.json"
        own = {"RANK": str(self.rank), "LOCAL_RANK": str(local)}
        own["TORCHELASTIC_ERROR_FILE"] = str(self.error_file)
        line = [sys.executable, "-m", "weft.run.script", *command]
        self.process = subprocess.Popen(line, env={**environment, **own}, start_new_session=True)
        self.descriptor = os.pidfd_open(self.process.pid) if hasattr(os, "pidfd_open") else None
        self._is_over = False

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Kill the rank, if it still runs, and what it has started itself and left behind.

        Once, and as soon as the rank has ended: later its number may be that of a stranger's group.
        """
        if self._is_over:
            return
        self._is_over = True
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def report(self) -> dict[str, str]:
        """Return what `weft.run.script`, or torch's `record`, wrote about an exception."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            report = dict(json.loads(self.error_file.read_text())["message"]["extraInfo"])
            return {name: _shortened(str(text)) for name, text in report.items()}
        return {}


class _Supervisor:
    def __init__(self, workers: Sequence[_Worker], group: Group, pressed: int, grace: float) -> None:
        self.workers, self.group, self.pressed, self.grace = workers, group, pressed, grace
        self.running = set(workers)
        self.outcome: Outcome | None = None
        self._kill_at: float | None = None
        self._reported = self._interrupted = self._pressed_before = False

    def run(self) -> Outcome:
        with selectors.DefaultSelector() as selector:
            for descriptor in (
                self.pressed,
                self.group.wake.fileno(),
                *(each.descriptor for each in self.workers),
            ):
                if descriptor is not None:
                    selector.register(descriptor, selectors.EVENT_READ)
            while self.running or not (self.outcome or self.group.is_over()):
                selector.select(self._timeout())
                ended = [each for each in self.running if each.process.poll() is not None]
                for worker in ended:
                    if worker.descriptor is not None:
                        selector.unregister(worker.descriptor)
                    worker.end()
                self._step(ended)
            self._hear()  # of a failure elsewhere that came with the end
        return self.outcome or Outcome()

    def _timeout(self) -> float | None:
        if any(each.descriptor is None for each in self.running):
            return POLL_SECONDS
        return None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())

    def _step(self, ended: Sequence[_Worker]) -> None:
        self.running.difference_update(ended)
        if self.outcome is None and any(each.process.returncode for each in ended):
            self._fail(_first_failure([each for each in ended if each.process.returncode]))
        for number in _read_signals(self.pressed):
            # Who signals all machines at once, as Slurm does, has pressed once on each.
            again = self._pressed_before or (self.outcome is not None and not self._interrupted)
            self._pressed_before = True
            self._interrupt(number, again=again)
            self.group.send({"type": "signal", "number": number, "again": again})
        self._hear()
        if not self.running and not self._reported:
            self._reported = True
            self.group.ended(self.outcome or Outcome())
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            for each in self.running:
                each.send(signal.SIGKILL)

    def _hear(self) -> None:
        """Take what came from other machines."""
        for message in self.group.messages():
            if message["type"] == "signal":
                self._interrupt(int(message["number"]), again=bool(message.get("again")))
            elif message["type"] == "outcome" and self.outcome is None:
                self.outcome = Outcome.from_json(message["outcome"])
                self._stop(signal.SIGTERM, FAILURE_GRACE_SECONDS)

    def _fail(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.group.failed(outcome)
        self._stop(signal.SIGTERM, FAILURE_GRACE_SECONDS)

    def _interrupt(self, number: int, *, again: bool) -> None:
        """Pass the first signal on, once; a second one kills."""
        if again or not self._interrupted:
            self._interrupted = True
            self.outcome = self.outcome or Outcome(code=128 + number)
            self._stop(signal.SIGKILL if again else number, self.grace)

    def _stop(self, number: int, grace: float) -> None:
        for each in self.running:
            each.send(number)
        self._kill_at = time.monotonic() + grace


def _first_failure(failed: Sequence[_Worker]) -> Outcome:
    """Return the failure that the others follow from.

    All of them ended before any was told to, so a rank that was killed comes before those that ended by
    themselves, and one that did not even report why before those that report the loss of a peer; else the
    first to report failed first.
    """
    reports = {each: each.report() for each in failed}

    def order(each: _Worker) -> tuple[bool, bool, int, int]:
        code, report = each.process.returncode, reports[each]
        by_itself = code > 0 or code == -signal.SIGABRT  # as NCCL ends a rank that has lost a peer
        return by_itself, bool(report), int(report.get("nanoseconds", 0)), each.rank

    first = min(failed, key=order)
    code = first.process.returncode
    if code < 0:  # as a shell does
        names = {each.value: each.name for each in signal.Signals}
        reason = f"was killed by {names.get(-code, f'signal {-code}')}"
        return Outcome(code=128 - code, rank=first.rank, reason=reason)
    stack = reports[first].get("py_callstack", "")
    reason = "failed" if stack else f"ended with code {code}"
    return Outcome(code=code, rank=first.rank, reason=reason, traceback=stack)


def _shortened(text: str) -> str:
    """Cut the middle out of a text that would not fit in a message to the other machines."""
    return (
        text if len(text) <= MAX_REPORT else f"{text[: MAX_REPORT // 4]}\n…\n{text[-3 * MAX_REPORT // 4 :]}"
    )


@contextmanager
def _signals() -> Iterator[int]:
    """Yield a descriptor that gets the number of each signal that comes, instead of what it did before."""
    reading, writing = os.pipe()
    for end in (reading, writing):
        os.set_blocking(end, False)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    if handlers[signal.SIGHUP] is signal.SIG_IGN:  # nohup
        del handlers[signal.SIGHUP]
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        for number in handlers:
            signal.signal(number, lambda *_: None)
        yield reading
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        os.close(reading)
        os.close(writing)


def _read_signals(descriptor: int) -> list[int]:
    with suppress(BlockingIOError):
        return [number for number in os.read(descriptor, 64) if number in SIGNALS]
    return []
