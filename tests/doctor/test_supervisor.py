"""The supervisor of one rank: how a child ends, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import pytest

from tests.worlds import becomes_true, running
from weft.doctor import child, supervisor
from weft.doctor.child import MACHINE, AttemptSpec
from weft.doctor.supervisor import AttemptResult, attempt

MACHINE_ORDER = AttemptSpec(suite=MACHINE.name, seconds=60.0, device="cpu")


def test_child_that_ends_gives_its_checks() -> None:
    account = attempt(MACHINE_ORDER, 3, lambda: None)
    assert (account.rank, account.ending, account.under_way) == (3, "ok", "")
    [check] = account.checks
    assert check["data"]["torch"] and check["data"]["gpu"] is None


def test_child_that_raises_gives_its_traceback() -> None:
    """Here without a launcher, so without a store to join by."""
    account = attempt(AttemptSpec(suite="nccl", seconds=60.0, device="cpu"), 0, lambda: None)
    assert account.ending == "failed" and account.message.startswith("ValueError: ")
    assert account.under_way == "the ranks join" and not account.is_in_check
    assert "in open_store" in account.traceback


def leave_grandchild(_: AttemptSpec, __: float, messages: Connection, output: Connection) -> None:
    child._begin_session(output)
    sleeper = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    messages.send_bytes(json.dumps({"check": {"name": "sleeper", "data": sleeper.pid}}).encode())
    messages.send_bytes(b'{"end": true}')


def test_what_a_child_has_started_ends_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "run", leave_grandchild)
    account = attempt(MACHINE_ORDER, 0, lambda: None)
    assert account.ending == "ok"
    assert becomes_true(lambda: not running(account.checks[0]["data"]), within=5.0)


def write_and_die(_: AttemptSpec, __: float, messages: Connection, output: Connection) -> None:
    child._begin_session(output)
    messages.send_bytes(b'{"under_way": "a check"}')
    os.write(2, b"x" * 10 * supervisor.MAX_OUTPUT + b"last words")
    os.kill(os.getpid(), signal.SIGSEGV)


def test_end_of_what_a_child_wrote_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "run", write_and_die)
    account = attempt(MACHINE_ORDER, 0, lambda: None)
    assert (account.ending, account.message) == ("crashed", "was killed by SIGSEGV")
    assert account.under_way == "a check" and account.is_in_check
    assert account.traceback.endswith("xlast words") and len(account.traceback) == supervisor.MAX_OUTPUT


def test_child_is_stopped_with_the_grace_that_is_left_to_it() -> None:
    assert attempt(MACHINE_ORDER, 0, lambda: 0.0).ending == "stopped"
    assert attempt(MACHINE_ORDER, 0, lambda: 60.0).ending == "ok"


def sleep_on(*_: object) -> None:
    time.sleep(100)


def test_child_that_cannot_be_killed_is_left_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(child, "run", sleep_on)
        patch.setattr(supervisor, "KILL_SECONDS", 0.05)
        patch.setattr(supervisor.os, "killpg", lambda pid, _: pids.append(pid))
        patch.setattr(
            supervisor._Child, "dump_stacks", lambda _: None
        )  # its signal ends one that has just begun
        patch.setattr("multiprocessing.process.BaseProcess.kill", lambda _: None)
        account = attempt(AttemptSpec(suite=MACHINE.name, seconds=0.01, device="cpu"), 0, lambda: None)
    assert account.ending == "hung" and account.message.endswith("and cannot be killed")
    for pid in pids:
        if running(pid):
            os.kill(pid, signal.SIGKILL)
    assert becomes_true(lambda: not any(map(running, pids)))


def test_dump_of_stacks_is_cut_to_what_tells() -> None:
    text = (
        "Thread 0x00007f1a2b3c4d5e (most recent call first):\n"
        '  File "weft/doctor/check_nccl.py", line 3 in checks\n'
        '  File "weft/doctor/child.py", line 72 in run\n  File "process.py", line 108 in run\n'
        '  File "forkserver.py", line 1 in main\n\nExtension modules: a, b (total: 2)\n'
    )
    assert supervisor.readable(text) == (
        'Thread 0x… (most recent call first):\n  File "weft/doctor/check_nccl.py", line 3 in checks\n'
        '  File "weft/doctor/child.py", line 72 in run\n\n'
    )


def test_account_of_a_part_that_says_too_much_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    check: dict[str, Any] = {"name": "a", "status": "ok", "note": "n" * 500, "numbers": {}, "data": "d" * 500}
    account = AttemptResult(rank=0, checks=[check] * 3)
    assert supervisor._bounded(account).count("d" * 500) == 3
    monkeypatch.setattr(supervisor, "MAX_RESULT", 1000)
    text = supervisor._bounded(account)
    assert "d" * 500 not in text and "n" * 101 not in text and "n" * 100 in text
