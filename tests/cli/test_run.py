"""`weft run`: ranks of a script that torch's agent starts here, without torch in the script itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.worlds import becomes_true, running
from weft.cli.main import main
from weft.run.launch import Ended, Machines, launch, usable_cores

LOSE = """
def lose_rank_1():
    # As one does that waits for a message: at the moment in which the other is gone.
    (here / f"own{rank}").write_text(str(os.getpid()))
    if rank == 1:
        return
    while not (here / "own1").exists() or not (pid := (here / "own1").read_text()):
        time.sleep(0.001)
    try:
        while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.001)
    except FileNotFoundError:
        pass
"""


@pytest.fixture
def script(tmp_path: Path):
    """Writes a script that finds `rank` and a folder `here` to leave things in."""

    def write(text: str) -> str:
        head = "import os, signal, sys, time\nfrom pathlib import Path\n"
        head += f"rank, here = int(os.environ['RANK']), Path({str(tmp_path)!r})\n" + LOSE
        path = tmp_path / "job.py"
        path.write_text(head + text)
        return str(path)

    return write


def ended(*words: str) -> object:
    """The exit code."""
    with pytest.raises(SystemExit) as end:
        main(["run", *words])
    return end.value.code


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("none.py",), "There is no script none.py"),
        ((__file__, "--ranks", "0"), "ranks=0"),
        ((__file__, "--nodes", "2", "--node", "2"), "node=2"),
        ((__file__, "--nodes", "2"), "--master is ''"),
        ((__file__, "--nodes", "2", "--master", "10.0.0.1"), "HOST:PORT"),
        ((__file__, "--nodes", "2", "--master", "10.0.0.1:70000"), "HOST:PORT"),
    ],
)
def test_mistakes_are_told_before_anything_runs(words, says, capsys) -> None:
    assert ended(*words) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_machines_that_do_not_meet_are_one_sentence(capfd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        assert ended(__file__, "--nodes", "2", "--master", master) == 4
    said = capfd.readouterr().err.splitlines()[-2:]
    assert said[0].startswith(f"weft: Machine 0 of 2 has not met the others at {master}: ")
    assert said[1].startswith("Machine 0 listens there")


def test_every_rank_runs_the_script_with_its_arguments(script, tmp_path, capfd) -> None:
    path = script(
        "names = ('WORLD_SIZE', 'LOCAL_RANK', 'OMP_NUM_THREADS')\n"
        "print(__name__, *(os.environ[name] for name in names), sys.argv[1:], sys.path[0] == str(here))"
    )
    before, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    assert ended(path, "a b", "--ranks", "2", "--steps", "3", "-x", "--", "--ranks", "9") == 0
    threads = max(1, usable_cores() // 2)
    arguments = ["a b", "--steps", "3", "-x", "--ranks", "9"]
    expected = [f"__main__ 2 {rank} {threads} {arguments} True" for rank in (0, 1)]
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == expected
    assert err == ""
    assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == (before, handler)


def test_one_traceback_is_shown_that_of_the_rank_that_failed_first(script, tmp_path, capfd) -> None:
    # Rank 0 fails in the same second, as one does that has lost a peer; rank 2 would go on for ever.
    path = script(
        "pid = here / 'pid2'\n"
        "if rank == 2: pid.write_text(str(os.getpid())); time.sleep(1000)\n"
        "while not (pid.exists() and pid.read_text()): time.sleep(0.001)\n"
        "lose_rank_1()\n"
        "raise ValueError(f'rank {rank} is at fault')"
    )
    assert ended(path, "--ranks", "3") == 1
    said = capfd.readouterr().err
    assert said.startswith("weft: rank 1 failed.\nTraceback (most recent call last):\n")
    assert said.count("Traceback") == 1
    assert "job.py" in said
    assert "runpy" not in said
    assert said.endswith("ValueError: rank 1 is at fault\n")
    assert not running(int((tmp_path / "pid2").read_text()))


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("sys.exit(7)", 7, "ended with code 7."),
        ("sys.exit('no data')", 1, "failed.\nno data"),
        ("os._exit(5)", 5, "ended with code 5."),
        ("os.kill(os.getpid(), signal.SIGKILL)", 128 + 9, "was killed by SIGKILL."),
    ],
)
def test_exit_codes_are_passed_on(text, code, said, script, capfd) -> None:
    # Rank 0 sees its peer go, and raises; who could say nothing went first.
    path = script(f"lose_rank_1()\nif rank == 1: {text}\nraise ConnectionError('lost rank 1')")
    assert ended(path) == code
    assert capfd.readouterr().err == f"weft: rank 1 {said}\n"


def test_a_script_that_does_not_parse_is_told_by_its_line(script, capfd) -> None:
    assert ended(script("while:"), "--ranks", "1") == 1
    said = capfd.readouterr().err
    assert "job.py" in said
    assert said.endswith("SyntaxError: invalid syntax\n")


def test_a_module_can_be_run_too(capfd) -> None:
    assert launch(["-m", "calendar", "2026", "2"], 2, Machines()) == Ended()
    assert capfd.readouterr().out.count("February 2026") == 2


INTERRUPTIBLE = """
try:
    (here / f"pid{rank}").write_text(str(os.getpid()))
    time.sleep(1000)
except KeyboardInterrupt:
    with (here / f"seen{rank}").open("a") as file:
        file.write("once ")
    PATIENCE
    raise
"""


def interrupt_when(ready, times: int) -> threading.Thread:
    """Ctrl-C as a terminal gives it: to this process alone, for ranks have sessions of their own."""

    def press() -> None:
        for count in range(times):
            assert becomes_true(lambda n=count: ready(n))
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    return thread


def test_ctrl_c_is_one_keyboard_interrupt_on_every_rank(script, tmp_path, capfd) -> None:
    pids = [tmp_path / f"pid{rank}" for rank in (0, 1)]
    thread = interrupt_when(lambda _: all(p.exists() and p.read_text() for p in pids), times=1)
    assert ended(script(INTERRUPTIBLE.replace("PATIENCE", "time.sleep(0.2)"))) == 130
    thread.join()
    assert [(tmp_path / f"seen{rank}").read_text() for rank in (0, 1)] == ["once ", "once "]
    assert capfd.readouterr() == ("", "weft: stopped.\n")
    assert not any(running(int(path.read_text())) for path in pids)


def test_a_second_ctrl_c_kills(script, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("weft.run.launch.GRACE_SECONDS", 1000)
    pids = [tmp_path / f"pid{rank}" for rank in (0, 1)]

    def ready(count: int) -> bool:
        files = [tmp_path / f"seen{rank}" for rank in (0, 1)] if count else pids
        return all(path.exists() and path.read_text() for path in files)

    thread = interrupt_when(ready, times=2)
    assert ended(script(INTERRUPTIBLE.replace("PATIENCE", "time.sleep(1000)"))) == 130
    thread.join()
    assert not any(running(int(path.read_text())) for path in pids)


def test_ranks_end_with_a_launcher_that_is_killed(script, tmp_path) -> None:
    path = script("(here / f'pid{rank}').write_text(str(os.getpid()))\ntime.sleep(1000)")
    command = [sys.executable, "-m", "weft.cli.main", "run", path]
    pids = [tmp_path / f"pid{rank}" for rank in (0, 1)]
    with subprocess.Popen(command) as launcher:
        try:
            assert becomes_true(lambda: all(p.exists() and p.read_text() for p in pids), within=60)
        finally:
            launcher.kill()
    assert becomes_true(lambda: not any(running(int(p.read_text())) for p in pids))
