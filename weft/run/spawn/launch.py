"""Launch: start a script on several ranks, supervise them, and report one outcome instead of N tracebacks.

Ranks find each other as under torchrun, by RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Their store listens
on loopback only; ranks of other machines reach it through `weft.run.spawn.nodes`.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from weft.run.net import interfaces
from weft.run.net.listener import listen
from weft.run.net.scratch import scratch
from weft.run.spawn.nodes import LaunchGroup, LaunchOutcome, Nodes, join
from weft.run.spawn.signals import caught_signals, read_signals, signal_name

__all__ = ["LaunchOutcome", "Nodes", "launch", "usable_cores"]

GRACE_SECONDS = 10
"""From Ctrl-C or SIGTERM to SIGKILL."""
FAILURE_GRACE_SECONDS = 10
"""From the first failure to the SIGKILL of ranks that still run: they have lost a peer and cannot finish."""
POLL_SECONDS = 0.05
"""Where the system has no descriptors of processes."""
MAX_REPORT = 100_000
"""Characters of a rank's traceback."""


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def launch(
    command: Sequence[str], ranks: int, nodes: Nodes | None = None, *, grace: float | None = None
) -> LaunchOutcome:
    """Run a script, or -m and a module, on `ranks` processes here; return when all of them have ended.

    `grace` is the time from Ctrl-C to SIGKILL. The first rank that fails ends the others, on all machines.
    """
    nodes, grace = nodes or Nodes(), GRACE_SECONDS if grace is None else grace
    with ExitStack() as stack:
        folder = stack.enter_context(scratch("run"))
        listening = stack.enter_context(listen(("127.0.0.1", 0))) if nodes.node == 0 else None
        port = listening.getsockname()[1] if listening else 0
        group = stack.enter_context(join(nodes, ranks, port, folder))
        signals = stack.enter_context(caught_signals())
        environment = os.environ | _environment(ranks, nodes, group)
        workers: list[_Worker] = []
        for local in range(ranks):
            workers.append(_Worker(command, local, environment, group, folder))
            stack.callback(workers[-1].end)
        from weft.run.net.stores import serve_store  # imports torch, here while the ranks do too

        store = serve_store(listening) if listening else None
        outcome = _Supervisor(workers, group, signals, grace).run()
        del store
        return outcome


def _environment(ranks: int, nodes: Nodes, group: LaunchGroup) -> dict[str, str]:
    """Return the variables of all ranks here; those that the user may have set are not replaced."""
    defaults = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
        **interfaces.environment(nodes.interface),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    return defaults | {name: os.environ[name] for name in defaults if os.environ.get(name)} | {
        "WORLD_SIZE": str(group.world), "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": str(nodes.node),
        "GROUP_WORLD_SIZE": str(nodes.count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(group.port),
        # torch: the launcher has the store, so rank 0 must open none.
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": group.run_id,
        "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0",
        "WEFT_LAUNCHER": str(os.getpid()),
    }  # fmt: skip


class _Worker:
    """The process of one rank, in a session of its own: only the launcher gets Ctrl-C, and forwards it."""

    def __init__(
        self,
        command: Sequence[str],
        local: int,
        environment: Mapping[str, str],
        group: LaunchGroup,
        folder: Path,
    ) -> None:
        self.rank = group.first + local
        self.error_file = folder / f"rank{self.rank}.json"
        own = {"RANK": str(self.rank), "LOCAL_RANK": str(local)}
        own["TORCHELASTIC_ERROR_FILE"] = str(self.error_file)
        line = [sys.executable, "-m", "weft.run.spawn.script", *command]
        self.process = subprocess.Popen(line, env={**environment, **own}, start_new_session=True)
        self.descriptor = os.pidfd_open(self.process.pid) if hasattr(os, "pidfd_open") else None
        self._is_over = False

    def send(self, number: int) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)

    def end(self) -> None:
        """Kill the rank, if it still runs, and the processes that it has started and left behind.

        Once, and as soon as the rank has ended: later its number may be that of another process group.
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
        """Return what `weft.run.spawn.script`, or torch's `record`, wrote about an exception."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            report = dict(json.loads(self.error_file.read_text())["message"]["extraInfo"])
            return {name: _shortened(str(text)) for name, text in report.items()}
        return {}


class _Supervisor:
    def __init__(self, workers: Sequence[_Worker], group: LaunchGroup, signals: int, grace: float) -> None:
        self.workers, self.group, self.signals, self.grace = workers, group, signals, grace
        self.running = set(workers)
        self.outcome: LaunchOutcome | None = None
        self._kill_at: float | None = None
        self._has_reported = self._is_interrupted = self._was_pressed = False

    def run(self) -> LaunchOutcome:
        with selectors.DefaultSelector() as selector:
            sources = (self.signals, self.group.wake.fileno(), *(each.descriptor for each in self.workers))
            for descriptor in sources:
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
            self._receive()  # a failure on another machine at the same time
        return self.outcome or LaunchOutcome()

    def _timeout(self) -> float | None:
        if any(each.descriptor is None for each in self.running):
            return POLL_SECONDS
        return None if self._kill_at is None else max(0.0, self._kill_at - time.monotonic())

    def _step(self, ended: Sequence[_Worker]) -> None:
        self.running.difference_update(ended)
        failed = [each for each in ended if each.process.returncode]
        if failed and self.outcome is None:
            self.outcome = _first_failure(failed)
            self.group.failed(self.outcome)
            self._stop(signal.SIGTERM, FAILURE_GRACE_SECONDS)
        for number in read_signals(self.signals):
            # A signal to all machines at once, as Slurm sends, counts as the first one on each.
            again = self._was_pressed or (self.outcome is not None and not self._is_interrupted)
            self._was_pressed = True
            self._interrupt(number, again=again)
            self.group.send({"type": "signal", "number": number, "again": again})
        self._receive()
        if not self.running and not self._has_reported:
            self._has_reported = True
            self.group.ended()
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill_at = None
            for each in self.running:
                each.send(signal.SIGKILL)

    def _receive(self) -> None:
        """Handle the messages of other machines."""
        for message in self.group.messages():
            if message["type"] == "signal":
                self._interrupt(int(message["number"]), again=bool(message.get("again")))
            elif message["type"] == "outcome" and self.outcome is None:
                self.outcome = LaunchOutcome.from_json(message["outcome"])
                self._stop(signal.SIGTERM, FAILURE_GRACE_SECONDS)

    def _interrupt(self, number: int, *, again: bool) -> None:
        """Forward the first signal, once; kill at a second one."""
        if again or not self._is_interrupted:
            self._is_interrupted = True
            self.outcome = self.outcome or LaunchOutcome(code=128 + number)
            self._stop(signal.SIGKILL if again else number, self.grace)

    def _stop(self, number: int, grace: float) -> None:
        for each in self.running:
            each.send(number)
        self._kill_at = time.monotonic() + grace


def _first_failure(failed: Sequence[_Worker]) -> LaunchOutcome:
    """Return the failure that caused the others.

    All of these ranks ended before the launcher stopped any. So a rank that was killed comes before those
    that ended by themselves, and one without a report before those that report the loss of a peer; else the
    first report counts.
    """
    reports = {each: each.report() for each in failed}

    def order(each: _Worker) -> tuple[bool, bool, int, int]:
        code, report = each.process.returncode, reports[each]
        by_itself = code > 0 or code == -signal.SIGABRT  # as NCCL ends a rank that has lost a peer
        return by_itself, bool(report), int(report.get("nanoseconds", 0)), each.rank

    first = min(failed, key=order)
    code = first.process.returncode
    if code < 0:  # as a shell does
        return LaunchOutcome(code=128 - code, rank=first.rank, reason=f"was killed by {signal_name(-code)}")
    stack = reports[first].get("py_callstack", "")
    reason = "failed" if stack else f"ended with code {code}"
    return LaunchOutcome(code=code, rank=first.rank, reason=reason, traceback=stack)


def _shortened(text: str) -> str:
    """Cut the middle out of a text that would not fit in a message to the other machines."""
    if len(text) <= MAX_REPORT:
        return text
    return f"{text[: MAX_REPORT // 4]}\n…\n{text[-3 * MAX_REPORT // 4 :]}"
