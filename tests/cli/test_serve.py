"""`weft serve`: what it refuses before it starts anything, how it starts, how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

import httpx  # noqa: E402

from tests.serve.hosting import ROOT, Process, until  # noqa: E402
from weft.cli.main import main  # noqa: E402
from weft.cli.numbers import amount, duration  # noqa: E402
from weft.core.errors import InputError  # noqa: E402
from weft.core.install import install_command
from weft.run.spawn.nodes import Nodes  # noqa: E402


def ended(*words: object) -> object:
    with pytest.raises(SystemExit) as end:
        main(["serve", *map(str, words)])
    return end.value.code


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The settings of those that were made; none is ever started."""
    made: list[Any] = []
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("weft.serve.engine.Engine", lambda settings: made.append(settings))
    return made


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--ranks", "0"), "--ranks must be >= 1, got 0"),
        (("--max-queue", "0"), "--max-queue must be >= 1, got 0"),
        (("--port", "65536"), "--port must be in 0 … 65535, got 65536"),
        (("--nodes", "2", "--node", "2"), "--node 2"),
        (("--nodes", "2"), "--master must be HOST or HOST:PORT of machine 0 of 2, got ''"),
        (("--nodes", "2", "--master", "10.0.0.1:65536"), "10.0.0.1:65536"),
        (("--nodes", "2", "--master", "10.0.0.1:29500"), "--token-file"),
        (("--policy", "fifo"), "elastic, all, one"),
        (("--dtype", "int8"), "dtype 'int8' is not supported"),
        (("--backend", "fa5"), "Use one of auto, exact, flash, cudnn, fa4"),
        (("--ttl", "24"), "ttl='24'"),
        (("--quota", "10 GO"), "quota='10 GO'"),
        (("--max-time", "10"), "max-time='10'"),
        (("--max-step", "0s"), "max-step='0s'"),
        (("--served-name", "../x"), "Invalid model name '../x'"),
        (("--host", "0.0.0.0", "--port", "0"), "--api-key-file"),
        (("--host", "192.0.2.1", "--port", "0", "--api-key-file", "KEY"), "192.0.2.1:0"),
        (("--api-key-file", "none"), "none cannot be read"),
        (("--api-key-file", "SHORT"), "at least 16"),
        (("--log-level", "loud"), "--log-level must be one of debug, info, warning, error, got"),
        (("--log-format", "xml"), "Use one of auto, text, json"),
        (("me/nothing-of-this-name",), "hf download me/nothing-of-this-name"),
        (("MODEL",), "is not a Diffusers checkpoint directory"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_started(words, says, engines, tmp_path, capfd) -> None:
    files = {"KEY": "k" * 32, "SHORT": "secret", "MODEL": None}
    for name, text in files.items():
        (tmp_path / name).mkdir() if text is None else (tmp_path / name).write_text(text)
    assert ended(*(tmp_path / word if word in files else word for word in words)) == 2
    assert says in capfd.readouterr().err
    assert engines == []


def test_a_port_that_is_taken_is_told_before_a_folder_is_made(engines, tmp_path, capfd) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert ended("--port", port) == 2
    assert f"127.0.0.1:{port}: Address already in use" in capfd.readouterr().err
    assert engines == []
    assert not (tmp_path / "state").exists()


def test_a_package_that_is_missing_is_named_with_what_adds_it(monkeypatch, engines, capfd) -> None:
    from weft.cli import packages

    real = packages.find_spec
    monkeypatch.setattr(packages, "find_spec", lambda name: None if name == "fastapi" else real(name))
    assert ended() == 3
    assert install_command("serve") in capfd.readouterr().err
    assert engines == []


def test_words_become_settings(monkeypatch, engines, tmp_path) -> None:
    monkeypatch.setattr("weft.serve.api.app.create_app", lambda *_, **__: None)
    monkeypatch.setattr("weft.serve.api.server.log_events", lambda *_, **__: None)
    monkeypatch.setattr("weft.serve.api.server.serve", lambda *_, **__: None)
    words = ("--ttl", "15m", "--quota", "1.5GiB", "--policy", "one", "--sparse", "sta", "--max-queue", "3")
    words += ("--max-time", "10m", "--max-step", "1.5s")
    assert ended("--port", "0", *words) in (0, None)
    (made,) = engines
    assert (made.keep, made.quota, made.policy, made.queue, made.ranks) == (900.0, 3 * 2**29, "one", 3, 2)
    assert (made.max_time, made.max_step) == (600.0, 1.5)
    assert asdict(made.options) == {
        "name": "weft-shapes",
        "dtype": "",
        "plan": "auto",
        "sparse": "sta",
        "cache": None,
        "backend": "auto",
    }
    assert made.folder == tmp_path / "state" / "weft" / "serve" / "weft-shapes"
    assert (made.name, made.nodes) == ("weft-shapes", Nodes())


def test_several_machines_meet_beside_the_master(monkeypatch, engines, tmp_path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("weft.cli.serve._join", seen.append)
    (tmp_path / "token").write_text("t" * 40)
    words = ("--nodes", "2", "--node", "1", "--master", "127.0.0.1:29500", "--token-file", tmp_path / "token")
    assert ended(*words) in (0, None)
    (settings,) = seen
    nodes = settings.nodes
    assert (nodes.count, nodes.node, nodes.master, nodes.token) == (2, 1, ("127.0.0.1", 29500), "t" * 40)
    assert (nodes.interface, nodes.address) == ("lo", "127.0.0.1")
    assert engines == []


def test_numbers_have_units() -> None:
    assert (duration("7d", "ttl"), amount("500 MB", "quota")) == (7 * 86400.0, 5 * 10**8)
    for bad in ("", "0s", "-1s", "1 h 5", "nan h", "5H"):
        with pytest.raises(InputError, match="ttl="):
            duration(bad, "ttl")


@pytest.fixture
def folder(tmp_path: Path) -> tuple[str, str]:
    return "--data", str(tmp_path / "data")


def job(url: str, id: str) -> dict[str, Any]:
    return httpx.get(f"{url}/v1/videos/{id}").json()


def create(url: str, **more: Any) -> str:
    made = httpx.post(f"{url}/v1/videos", json={"prompt": "a <secret> circle", "seed": 1, **more})
    assert made.status_code == 200, made.text
    return made.json()["id"]


def test_the_first_signal_lets_what_runs_end(folder) -> None:
    with Process(folder, PACE="0.05") as server:
        url = server.url()
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        id = create(url)
        until(lambda: job(url, id)["status"] == "in_progress")
        os.kill(server.pid, signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert httpx.get(f"{url}/health").json() == {"status": "draining"}
        assert httpx.post(f"{url}/v1/videos", json={"prompt": "late"}).status_code == 503
        code, said = server.ended()
    assert code == 0, said
    lines = [json.loads(line) for line in said.splitlines()]
    assert [line["signal"] for line in lines if line["message"] == "draining"] == ["SIGTERM"]
    assert [line["status"] for line in lines if line["message"] == "job ended"] == ["completed"]
    assert "<secret>" not in said


def test_what_does_not_end_in_time_is_kept_whoever_watches_it(folder) -> None:
    with Process(folder, PACE="0.3", GRACE="0.3") as server:
        url = server.url()
        id = create(url, num_inference_steps=60)
        with httpx.stream("GET", f"{url}/v1/videos/{id}/events", timeout=60) as events:
            next(events.iter_lines())
            os.kill(server.pid, signal.SIGTERM)
            code, said = server.ended()
    assert code == 0, said
    with Process((*folder, "--log-prompts"), PACE="0.001") as server:
        url = server.url()
        until(lambda: job(url, id)["status"] == "completed", 60.0)
        os.kill(server.pid, signal.SIGTERM)
        code, said = server.ended()
    assert code == 0
    assert "<secret>" in said


def test_a_second_signal_ends_at_once(folder) -> None:
    with Process(folder, PACE="0.3", GRACE="1000") as server:
        url = server.url()
        create(url, num_inference_steps=60)
        os.kill(server.pid, signal.SIGINT)
        until(lambda: httpx.get(f"{url}/health").status_code == 503)
        os.kill(server.pid, signal.SIGINT)
        code, _ = server.ended()
    assert code == 128 + signal.SIGINT


def test_ranks_that_cannot_start_end_the_server(folder) -> None:
    with Process(folder, STATE="failed") as server:
        code, said = server.ended()
    assert code == 4
    assert "weft: The ranks failed to start. There is no such GPU." in said


BROKEN = """
import sys

class Refuses:
    def find_spec(self, name, path=None, target=None):
        if name == "weft.serve.worker":
            raise ImportError("libgpu.so.9 is not there")

sys.meta_path.insert(0, Refuses())
"""


def test_ranks_that_cannot_even_be_imported_end_the_server_too(folder, tmp_path) -> None:
    """No fakes here: what an agent starts dies before it says hello."""
    (tmp_path / "sitecustomize.py").write_text(BROKEN)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    ended = subprocess.run(
        [sys.executable, "-m", "weft", "serve", "--port", "0", "--ranks", "1", *folder],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert ended.returncode == 4
    assert ended.stderr.splitlines()[-1] == (
        "weft: The ranks failed to start. ImportError: libgpu.so.9 is not there"
    )
    assert ended.stderr.count("Traceback") >= 3


def test_slow_and_foreign_clients_are_sent_away(folder) -> None:
    with Process(folder, HEAD="1") as server:
        url = httpx.URL(server.url())

        def answer(data: bytes) -> bytes:
            with socket.create_connection((url.host, url.port), timeout=20) as client:
                client.sendall(data)
                return b"".join(iter(lambda: client.recv(4096), b""))

        assert answer(b"") == b""
        assert answer(b"GET /live HTTP/1.1\r\nHost: loc") == b""
        first = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"
        # A head in time, and then half a one.
        assert answer(first + b"GET /live HT").count(b"HTTP/1.1 200") == 1
        garbage = answer(b"\x16\x03\x01 hello\r\n\r\n")
        assert garbage.startswith(b"HTTP/1.1 400")
        assert json.loads(garbage.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_request"
        long = answer(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 70_000)
        assert long == b"" or long.startswith(b"HTTP/1.1 4")
        assert httpx.get(f"{url}/live").status_code == 200
