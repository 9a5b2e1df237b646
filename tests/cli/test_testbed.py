"""`weft testbed`: what it shows, what it runs and what it says where it cannot."""

from __future__ import annotations

import re
import sys

import pytest

from tests.worlds import becomes_true
from weft.cli import testbed
from weft.cli.main import main
from weft.core.errors import MissingError
from weft.run.spawn.testbed import NAMES, SETTINGS, Testbed


@pytest.fixture(scope="module")
def _machines() -> None:
    try:
        Testbed(1).close()
    except MissingError as error:
        pytest.skip(str(error))


def ended(*words: str) -> object:
    """The exit code."""
    with pytest.raises(SystemExit) as end:
        main(["testbed", *words])
    return end.value.code


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("two",), "'two' is not machines x devices"),
        (("0x2",), "'0x2' is not machines x devices"),
        (("--", "train.py"), "a script goes after --"),
        (("999x1",), "machines must be 1 to 250, got 999"),
        (("2x1", "--rate", "fast"), "got 'fast'"),
    ],
)
def test_mistakes_are_told(words, says, capsys) -> None:
    assert ended(*words) == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_without_root_it_says_so(capsys, monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: f"/sbin/{tool}")
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert ended() == 3
    assert "needs root, to make network namespaces; this is user 1000" in capsys.readouterr().err


def test_without_iproute2_it_names_the_package(capsys, monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda tool: None if tool == "tc" else f"/sbin/{tool}")
    assert ended() == 3
    said = capsys.readouterr().err
    assert "tc cannot be found" in said
    assert "apt install iproute2" in said


@pytest.mark.usefixtures("_machines")
def test_where_namespaces_are_refused_it_says_what_would_work(capsys, monkeypatch) -> None:
    monkeypatch.setitem(SETTINGS, "ipv4/tcp_congestion_control", "nonsense")
    assert ended() == 3
    said = capsys.readouterr().err
    assert "refuses network namespaces" in said
    assert "--privileged" in said


@pytest.mark.usefixtures("_machines")
def test_it_shows_the_machines_and_what_they_sent(capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    assert ended("2x1", "--rate", "1gbit") == 0
    lines = capsys.readouterr().out.splitlines()
    for i, line in enumerate(lines[1:3]):
        assert re.search(rf"-m{i} +10\.77\.0\.{i + 1} +1gbit ", line)
        sent, wire = map(float, re.findall(r"([\d.]+) MB ", line))
        assert sent == pytest.approx(21.0)
        assert wire == pytest.approx(sent, rel=0.02)


# One fresh torch for each rank and each launcher: the only test that starts torchrun.
WORLD = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
local = os.environ["LOCAL_WORLD_SIZE"]
sys.stdout.write(f"rank {dist.get_rank()} of {local} here, sum {total.item():.0f} {sys.argv[1:]}\\n")
dist.destroy_process_group()
"""


@pytest.mark.usefixtures("_machines")
def test_torchrun_starts_a_script_in_every_machine(tmp_path, capsys) -> None:
    script = tmp_path / "world.py"
    script.write_text(WORLD)
    assert ended("2x1", "--", str(script), "--steps", "3") == 0
    said = capsys.readouterr().out
    for i in (0, 1):
        assert f"[m{i}] rank {i} of 1 here, sum 3 ['--steps', '3']" in said


@pytest.fixture
def plain(monkeypatch, _machines) -> None:
    """Python itself in the place of torchrun."""
    monkeypatch.setattr(testbed, "_torchrun", lambda *_: [sys.executable])


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("code", [0, 3])
def test_the_exit_code_is_passed_on(code: int, capsys) -> None:
    script = f"import sys; print('a'); print('b', file=sys.stderr); sys.exit({code})"
    assert ended("2x1", "--", "-c", script) == code
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "[m0] a", "[m0] b", "[m1] a", "[m1] b"]


@pytest.mark.usefixtures("plain")
def test_when_one_machine_is_killed_the_others_do_not_wait_for_ever(monkeypatch) -> None:
    monkeypatch.setattr(testbed, "GRACE_SECONDS", 0.1)
    alone = (
        "import os, time\n"
        "own = os.popen('ip -br addr show eth0').read()\n"
        "os.kill(os.getpid(), 9) if '10.77.0.2/' in own else time.sleep(1000)"
    )
    before = set(NAMES.glob("weft-*"))
    assert ended("3x1", "--", "-c", alone) == 128 + 9
    assert becomes_true(lambda: set(NAMES.glob("weft-*")) <= before)
