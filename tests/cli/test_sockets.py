"""Commands listen on loopback only, whatever the host name resolves to, and unpickle nothing from a port."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests import watch
from tests.cli.test_train import RECIPE
from weft.core.errors import MissingError
from weft.run.spawn.testbed import Testbed

ROOT = Path(__file__).parents[2]
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
x = torch.ones(3); dist.all_reduce(x); assert x[0] == dist.get_world_size()
dist.barrier(); dist.destroy_process_group()
"""
# The host name is that of the card, as on an ordinary server.
IN_MACHINE = """
printf "127.0.0.1 localhost\\n%s %s\\n" "$0" "$(hostname)" >"$1"
mount --bind "$1" /etc/hosts
shift
exec "$@"
"""


@pytest.fixture(scope="module")
def bed() -> Iterator[Testbed | None]:
    """One machine with a card; None where namespaces cannot be made, and then commands run beside us."""
    found = None
    with suppress(MissingError):
        found = Testbed(1, rate=None)
    yield found
    if found is not None:
        found.close()


@pytest.fixture
def watched(bed: Testbed | None, tmp_path: Path) -> Any:
    def run(*words: object, seconds: int = 120, options: tuple[str, ...] = ()) -> dict[str, Any]:
        report = tmp_path / "report.json"
        command = [
            sys.executable,
            "-m",
            "tests.watch",
            str(report),
            str(seconds),
            *options,
            "--",
            *map(str, words),
        ]
        if bed is not None:
            shell = [
                "unshare",
                "--mount",
                "sh",
                "-c",
                IN_MACHINE,
                bed.machines[0].address,
                str(tmp_path / "hosts"),
            ]
            command = bed.command(0, *shell, *command)
        environment = os.environ | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.pop(name, None)
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds + 60
        )
        assert report.exists(), done.stderr
        return json.loads(report.read_text()) | {"text": done.stdout + done.stderr}

    return run


def check(seen: dict[str, Any]) -> None:
    assert seen["code"] == 0, seen["text"]
    assert seen["addresses"] == ["127.0.0.1"], seen["addresses"]
    assert seen["sent"] > 0
    assert not seen["ran"]


WEFT = (sys.executable, "-m", "weft")


def test_serve_listens_on_loopback_only_also_after_a_rank_was_killed(watched, tmp_path: Path) -> None:
    words = ("serve", "--port", "0", "--ranks", "2", "--data", tmp_path / "data")
    seen = watched(*WEFT, *words, options=("--serve",))
    assert seen["restarts"] == 1, seen["text"]
    check(seen)


def test_run_listens_on_loopback_only(watched, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    check(watched(*WEFT, "run", tmp_path / "job.py", "--ranks", "3"))


def test_train_listens_on_loopback_only(watched, tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    words = (
        "train",
        tmp_path / "tiny.toml",
        "--ranks",
        "2",
        "--steps",
        "2",
        "--quiet",
        "-o",
        tmp_path / "run",
    )
    check(watched(*WEFT, *words))


def test_verify_listens_on_loopback_only(watched) -> None:
    check(watched(*WEFT, "verify", "--ranks", "2", "--tokens", "61", "--heads", "2", "--plan", "ring"))


def test_doctor_of_gpus_listens_on_loopback_only(watched, tmp_path: Path) -> None:
    words = ("doctor", "--gpu", "--device", "cpu", "--only", "nccl", "--out", tmp_path / "out")
    check(watched(*WEFT, *words))


def test_demo_listens_on_loopback_only(watched, tmp_path: Path) -> None:
    """It generates a video, too."""
    check(watched(*WEFT, "demo", "--ranks", "2", "-o", tmp_path / "demo.mp4", seconds=200))


def test_watch_sees_a_socket_on_all_interfaces(watched, tmp_path: Path) -> None:
    """So that the tests above can fail."""
    code = "import socket, time; s = socket.create_server(('0.0.0.0', 0)); time.sleep(1.5)"
    assert watched(sys.executable, "-S", "-c", code)["addresses"] == ["0.0.0.0"]


def test_canary_runs_where_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(watch.canary(tmp_path / "ran"))
    assert (tmp_path / "ran").exists()
    with socket.create_server(("127.0.0.1", 0)) as here:
        assert here.getsockname() in watch.listening([os.getpid()])
