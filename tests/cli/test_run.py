"""`weft run`: the ranks of a script, supervised, without torch in the script itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import pytest

from tests.worlds import becomes_true, running
from weft.cli.main import main
from weft.run.net.interfaces import LOOPBACK
from weft.run.spawn.launch import LaunchOutcome, _first_failure, launch, usable_cores

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
        (("none.py",), "Script none.py not found"),
        ((__file__, "--ranks", "0"), "--ranks must be >= 1, got 0."),
        ((__file__, "--nodes", "2", "--node", "2"), "--node 2"),
        ((__file__, "--nodes", "2", "--master", "127.0.0.1:29500"), "--nodes 2 requires --token-file"),
        ((__file__, "--nodes", "2"), "--master must be HOST or HOST:PORT of machine 0 of 2, got ''"),
        ((__file__, "--nodes", "2", "--master", "10.0.0.1:"), "HOST:PORT"),
        ((__file__, "--nodes", "2", "--master", "10.0.0.1:70000"), "HOST:PORT"),
    ],
)
def test_mistakes_are_told_before_anything_runs(words, says, capsys) -> None:
    assert ended(*words) == 2
    assert says in " ".join(capsys.readouterr().err.split())


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("a-secret-of-all-machines\n")
    return path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


def test_name_of_machine_0_that_is_its_loopback_is_refused(token, monkeypatch, capsys) -> None:
    monkeypatch.setattr("weft.run.spawn.nodes.listen", None)
    monkeypatch.setattr("weft.run.net.interfaces.resolve", lambda _: "127.0.1.1")
    given = ("--nodes", "2", "--master", "machine0:29500", "--token-file", str(token))
    assert ended(__file__, *given) == 2
    assert "--master machine0 resolves to 127.0.1.1" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--interface", "nothere0"), "--interface nothere0 has no address"),
        (("--master", "192.0.2.7:29500"), "No interface of this machine has the address 192.0.2.7"),
        (("--master", "nothere.invalid:29500"), "does not resolve"),
        (("--tls-cert", __file__), "--tls-cert and --tls-key belong together"),
        (("--tls-cert", __file__, "--tls-key", __file__), "cannot be used"),
    ],
)
def test_network_mistakes_are_told_before_anything_listens(words, says, token, monkeypatch, capsys) -> None:
    monkeypatch.setattr("weft.run.spawn.nodes.listen", None)  # calling it would raise
    given = ("--nodes", "2", "--master", "127.0.0.1:29500", "--token-file", str(token), *words)
    assert ended(__file__, *given) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_no_certificate_can_be_made_is_told_before_anything_listens(token, monkeypatch, capsys) -> None:
    monkeypatch.setattr("weft.cli.packages.find_spec", lambda _: None)
    monkeypatch.setattr("weft.run.spawn.nodes.listen", None)
    given = ("--nodes", "2", "--master", "127.0.0.1:29500", "--token-file", str(token))
    assert ended(__file__, *given) == 3
    assert "This needs cryptography (for TLS between machines, unless --tls-cert" in capsys.readouterr().err


def test_port_that_is_taken_is_one_sentence(token, capfd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        master = f"127.0.0.1:{taken.getsockname()[1]}"
        assert ended(__file__, "--nodes", "2", "--master", master, "--token-file", str(token)) == 2
    assert f"weft: Cannot listen at {master}: " in capfd.readouterr().err


def test_missing_machines_are_named(token, monkeypatch, capfd) -> None:
    monkeypatch.setattr("weft.run.spawn.nodes.JOIN_SECONDS", 0.2)
    given = ("--nodes", "3", "--master", f"127.0.0.1:{free_port()}", "--token-file", str(token))
    assert ended(__file__, *given) == 4
    assert "Machines 1, 2 have not joined within 0 s." in capfd.readouterr().err


class Other:
    """`weft run` as one machine of two."""

    def __init__(self, path: str, master: str, token: Path, *words: str, node: int = 1) -> None:
        given = ("--nodes", "2", "--node", str(node), "--master", master, "--token-file", str(token), *words)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "weft.cli.main", "run", path, *given],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=120)
        return self.process.returncode, out, err


def two_machines(path: str, token: Path, *words: str) -> tuple[object, tuple[int, str, str]]:
    """The exit code of machine 0, and how machine 1 ended."""
    master = f"127.0.0.1:{free_port()}"
    other = Other(path, master, token, *words)
    given = ("--nodes", "2", "--master", master, "--token-file", str(token), *words)
    return ended(path, *given), other.ended()


def test_two_machines_are_one_world(script, token, tmp_path, capfd) -> None:
    path = script(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "x = torch.tensor([2 ** dist.get_rank()]); dist.all_reduce(x)\n"
        "(here / f'run{rank}').write_text(os.environ['TORCHELASTIC_RUN_ID'])\n"
        "print(dist.get_rank(), dist.get_world_size(), os.environ['GROUP_RANK'], int(x), flush=True)\n"
        "dist.destroy_process_group()"
    )
    code, other = two_machines(path, token, "--ranks", "2")
    assert (code, other[0]) == (0, 0), other
    lines = capfd.readouterr().out.splitlines() + other[1].splitlines()
    assert sorted(lines) == ["0 4 0 15", "1 4 0 15", "2 4 1 15", "3 4 1 15"]
    assert len({(tmp_path / f"run{rank}").read_text() for rank in range(4)}) == 1


def test_failure_on_one_machine_ends_and_names_it_on_both(script, token, capfd) -> None:
    path = script("if rank == 1: raise ValueError('no loom')\ntime.sleep(1000)")
    code, other = two_machines(path, token, "--ranks", "1")
    assert (code, other[0]) == (1, 1)
    for text in (capfd.readouterr().err, other[2]):
        assert text.startswith("weft: rank 1 failed.\n"), text
        assert text.endswith("ValueError: no loom\n")


def test_signal_to_all_machines_at_once_is_one_signal_for_each_rank(script, token, tmp_path) -> None:
    """As Slurm sends it: every launcher gets its own, and hears of the other's."""
    path = script(
        "def save(*_):\n    time.sleep(1.0); (here / f'saved{rank}').touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n(here / f'up{rank}').touch()\ntime.sleep(1000)"
    )
    master = f"127.0.0.1:{free_port()}"
    nodes = [Other(path, master, token, "--ranks", "1", node=node) for node in (0, 1)]
    assert becomes_true(lambda: all((tmp_path / f"up{rank}").exists() for rank in (0, 1)), within=60)
    for each in nodes:
        each.process.send_signal(signal.SIGTERM)
    assert [each.ended()[0] for each in nodes] == [143, 143]
    assert all((tmp_path / f"saved{rank}").exists() for rank in (0, 1))


def test_what_a_rank_started_ends_with_the_launch_and_long_tracebacks_are_cut(script, tmp_path) -> None:
    path = script(
        "import subprocess\n"
        "child = subprocess.Popen(['sleep', '1000'])\n(here / 'child').write_text(str(child.pid))\n"
        "raise ValueError('x' * 2_000_000)"
    )
    outcome = launch([path], 1)
    assert outcome.reason == "failed"
    assert len(outcome.traceback) < 200_000
    assert becomes_true(lambda: not running(int((tmp_path / "child").read_text())))


def test_group_of_a_rank_is_killed_when_the_rank_ends_and_never_again(script, tmp_path, monkeypatch) -> None:
    """Hours later, at the end of the launch, its number may be that of a stranger's group."""
    killed: list[int] = []
    real = os.killpg

    def killpg(pid: int, number: int) -> None:
        killed.append(pid)
        (tmp_path / "killed").touch()
        real(pid, number)

    monkeypatch.setattr("weft.run.spawn.launch.os.killpg", killpg)
    path = script(
        "for _ in range(rank * 10_000):\n"
        "    if (here / 'killed').exists(): break\n"
        "    time.sleep(0.001)\n"
        "else: sys.exit(rank)"
    )
    assert launch([path], 2) == LaunchOutcome()
    assert len(killed) == len({*killed}) == 2


def test_another_token_is_refused_on_both_sides(script, token, tmp_path, caplog) -> None:
    wrong, master = tmp_path / "wrong", f"127.0.0.1:{free_port()}"
    wrong.write_text("another-secret-of-theirs")
    other, ends = Other(script(""), master, wrong), []

    def leave_when_told() -> None:
        ends.append(other.ended())
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=leave_when_told)
    thread.start()
    assert ended(script(""), "--nodes", "2", "--master", master, "--token-file", str(token)) == 130
    thread.join()
    assert ends[0][0] == 4
    assert "the tokens differ" in ends[0][2]
    assert "from 127.0.0.1 was refused: the tokens differ" in caplog.text


def test_every_rank_runs_the_script_with_its_arguments(script, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")  # gloo would take the card of the host name
    path = script(
        "names = ('WORLD_SIZE', 'LOCAL_RANK', 'OMP_NUM_THREADS', 'GLOO_SOCKET_IFNAME')\n"
        "print(__name__, *(os.environ[name] for name in names), sys.argv[1:], sys.path[0] == str(here))"
    )
    before, handler = dict(os.environ), signal.getsignal(signal.SIGINT)
    assert ended(path, "a b", "--ranks", "2", "--steps", "3", "-x", "--", "--ranks", "9") == 0
    threads = max(1, usable_cores() // 2)
    arguments = ["a b", "--steps", "3", "-x", "--ranks", "9"]
    expected = [f"__main__ 2 {rank} {threads} {LOOPBACK} {arguments} True" for rank in (0, 1)]
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == expected
    assert err == ""
    assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == (before, handler)


def test_rank_writes_whole_lines_also_if_unbuffered(script, monkeypatch, capfd) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")
    path = script(
        "for fd, out in (1, sys.stdout), (2, sys.stderr):\n"
        "    print('a', file=out, end=' '); os.write(fd, b'b '); print('c', file=out)"
    )
    assert ended(path, "--ranks", "1") == 0
    assert capfd.readouterr() == ("b a c\n", "b a c\n")


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


def test_rank_that_died_first_is_named_whatever_the_others_do_with_sigterm(script, tmp_path, capfd) -> None:
    path = script(
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "(here / f'up{rank}').touch()\n"
        "while not all((here / f'up{n}').exists() for n in range(3)): time.sleep(0.001)\n"
        "if rank == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "time.sleep(1000)"
    )
    assert ended(path, "--ranks", "3") == 128 + 9
    assert capfd.readouterr().err == "weft: rank 2 was killed by SIGKILL.\n"


@pytest.mark.parametrize("code", [9, 1, -signal.SIGABRT])
def test_rank_that_was_killed_comes_before_those_that_ended_by_themselves(code: int) -> None:
    """The launcher may see both at once, on a busy machine."""
    ranks = [
        mock.Mock(rank=rank, **{"process.returncode": its, "report.return_value": {}})
        for rank, its in enumerate((code, code, -signal.SIGKILL))
    ]
    assert _first_failure(ranks).rank == 2


def test_stopped_rank_does_not_hold_up_the_end(script, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr("weft.run.spawn.launch.FAILURE_GRACE_SECONDS", 0.5)
    path = script(
        "(here / f'pid{rank}').write_text(str(os.getpid()))\n"
        "if rank == 0: os.kill(os.getpid(), signal.SIGSTOP)\n"
        "while not (here / 'pid0').exists(): time.sleep(0.001)\n"
        "raise ValueError('rank 0 does not answer')"
    )
    assert ended(path) == 1
    assert capfd.readouterr().err.startswith("weft: rank 1 failed.\n")
    assert not running(int((tmp_path / "pid0").read_text()))


def test_a_script_that_does_not_parse_is_told_by_its_line(script, capfd) -> None:
    assert ended(script("while:"), "--ranks", "1") == 1
    said = capfd.readouterr().err
    assert "job.py" in said
    assert said.endswith("SyntaxError: invalid syntax\n")


def test_a_module_can_be_run_too(capfd) -> None:
    assert launch(["-m", "calendar", "2026", "2"], 2) == LaunchOutcome()
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
    monkeypatch.setattr("weft.run.spawn.launch.GRACE_SECONDS", 1000)
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


SLURM = {"SLURM_NNODES": "2", "SLURM_NODEID": "{node}", "SLURM_JOB_NODELIST": "{host},gpu[03-04]"}
CLUSTERS = {
    "LeaderWorkerSet": (
        {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "{node}", "LWS_LEADER_ADDRESS": "{host}"},
        {"PET_MASTER_PORT": "{port}"},
    ),
    "Slurm, one step": (
        {**SLURM, "SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NODELIST": "{host},gpu04"},
        {"PET_MASTER_PORT": "{port}"},
    ),
    "Slurm": (SLURM, {"PET_MASTER_PORT": "{port}"}),
    "torchrun": (
        {
            "PET_NNODES": "2",
            "PET_NODE_RANK": "{node}",
            "PET_MASTER_ADDR": "{host}",
            "PET_MASTER_PORT": "{port}",
        },
        {},
    ),
}


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_variables_of_a_cluster_are_the_defaults_of_nodes(cluster, script, token) -> None:
    """The real command, once per machine; only the port differs from that of the cluster, to be free here."""
    path = script("print(rank, os.environ['WORLD_SIZE'], os.environ['GROUP_RANK'], flush=True)")
    port = free_port()
    machines = []
    for node in range(2):
        variables = {
            name: text.format(node=node, host="127.0.0.1", port=port)
            for group in CLUSTERS[cluster]
            for name, text in group.items()
        }
        machines.append(
            subprocess.Popen(
                [sys.executable, "-m", "weft.cli.main", "run", path, "--ranks", "1", "--token-file", token],
                env=os.environ | variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    ends = [(*machine.communicate(timeout=120), machine.returncode) for machine in machines]
    assert [(out, code) for out, _, code in ends] == [("0 2 0\n", 0), ("1 2 1\n", 0)], ends


def test_options_win_over_the_variables_of_a_cluster_and_errors_name_them(
    script, token, monkeypatch, capfd
) -> None:
    for name, value in {**SLURM, "SLURM_NODEID": "1"}.items():
        monkeypatch.setenv(name, value)
    path = script("print(os.environ['WORLD_SIZE'], flush=True)")
    assert ended(path, "--ranks", "1", "--nodes", "1") == 0
    assert capfd.readouterr().out == "1\n"
    assert ended(path, "--ranks", "1") == 2
    assert "SLURM_NNODES is set: pass --nodes 1 to use this machine alone." in " ".join(
        capfd.readouterr().err.split()
    )
