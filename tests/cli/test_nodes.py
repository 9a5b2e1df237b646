"""Several machines, as network namespaces: who may join, what listens, and what is seen on the wire."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.watch import canary, listening
from tests.worlds import becomes_true
from weft.core.errors import MissingError
from weft.run.spawn.testbed import Testbed

ROOT = Path(__file__).parents[2]
TOKEN, OTHER = "c0ffee-c0ffee-c0ffee-c0ffee", "decaf-decaf-decaf-decaf-decaf"
PORT = 29500
# Ranks add up until there is a file; rank 0 tells how often.
LOOP = """
import sys, torch, torch.distributed as dist
from pathlib import Path
here = Path(sys.argv[1])
dist.init_process_group("gloo")
rounds, goes_on = 0, torch.ones(1)
while goes_on[0]:
    x = torch.ones(1); dist.all_reduce(x); assert x[0] == 2
    rounds += 1
    if dist.get_rank() == 0:
        (here / "rounds.new").write_text(str(rounds)); (here / "rounds.new").replace(here / "rounds")
        goes_on[0] = not (here / "stop").exists()
    dist.broadcast(goes_on, 0)
dist.destroy_process_group()
"""
# Every packet that crosses the switch.
CAPTURE = """
import socket, sys
wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**25)
with open(sys.argv[1], "wb", buffering=0) as file:
    print("ready", flush=True)
    while True:
        file.write(wire.recv(2**17))
"""
# Ends TLS with a certificate of its own, and passes every byte on.
RELAY = """
import socket, sys, threading
from pathlib import Path
from weft.run.net.listener import forward
from weft.run.net.tls import TLSSocket, client_context, self_signed, server_context
context = server_context(self_signed(Path(sys.argv[1])))
middle = socket.create_server(("", int(sys.argv[3])))
print("ready", flush=True)
while True:
    client = TLSSocket(middle.accept()[0], context, server=True)
    there = socket.create_connection((sys.argv[2], int(sys.argv[3])))
    server = TLSSocket(there, client_context(), server=False)
    def carry(client=client, server=server):
        client.handshake(); server.handshake(); forward(client, server)
    threading.Thread(target=carry, daemon=True).start()
"""
PLAIN = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as there:
    there.sendall(bytes.fromhex(sys.argv[3]))
    there.settimeout(15)
    try:
        while there.recv(4096): pass
    except ConnectionResetError: pass
print("closed")
"""

HEALTH = """
import sys, urllib.error, urllib.request
try: print(urllib.request.urlopen(sys.argv[1]).read().decode())
except urllib.error.HTTPError as error: print(error.read().decode())
except OSError: print("{}")
"""


class Machines:
    """Commands in the machines of a test bed, ended with it."""

    def __init__(self, bed: Testbed, folder: Path, stack: ExitStack) -> None:
        self.bed, self.folder, self._stack = bed, folder, stack
        self.master = f"{bed.machines[0].address}:{PORT}"
        for name, text in (("token", TOKEN), ("wrong", OTHER)):
            (folder / name).write_text(text)

    def start(self, machine: int | str, *words: object) -> subprocess.Popen[str]:
        """Of a machine, or of the switch between them."""
        prefix = self.bed.command(machine) if isinstance(machine, int) else ["ip", "netns", "exec", machine]
        environment = os.environ | {"HOME": str(self.folder), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*prefix, sys.executable, *map(str, words)], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._stack.callback(self._end, process)
        return process

    def weft(self, machine: int, *words: object, master: str = "", token: str = "token") -> Any:
        where = ("--nodes", 2, "--master", master or self.master, "--token-file", self.folder / token)
        return self.start(machine, "-m", "weft", *words, *where, "--node", min(machine, 1))

    @staticmethod
    def _end(process: subprocess.Popen[str]) -> None:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    with ExitStack() as stack:
        try:
            bed = stack.enter_context(Testbed(3, rate=None))
        except MissingError as error:
            pytest.skip(str(error))
        yield Machines(bed, tmp_path, stack)


def tree(process: subprocess.Popen[str]) -> list[int]:
    return [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]


def addresses(*processes: subprocess.Popen[str]) -> set[str]:
    return {address for process in processes for address, _ in listening(tree(process))}


def refused(process: subprocess.Popen[str]) -> str:
    """What a command says that the others do not let in."""
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    return err


def test_strangers_are_refused_while_the_group_works_and_the_token_never_travels(
    machines: Machines, tmp_path: Path
) -> None:
    wire = tmp_path / "wire"
    capture = machines.start(machines.bed._switch, "-S", "-c", CAPTURE, wire)
    assert capture.stdout.readline() == "ready\n"
    (tmp_path / "loop.py").write_text(LOOP)
    words = ("run", tmp_path / "loop.py", tmp_path, "--ranks", 1)
    group = [machines.weft(machine, *words) for machine in (0, 1)]
    rounds: Callable[[], int] = lambda: int((tmp_path / "rounds").read_text())  # noqa: E731
    assert becomes_true((tmp_path / "rounds").exists, within=60), group[0].communicate(timeout=1)

    own = {machine.address for machine in machines.bed.machines[:2]}
    assert addresses(*group) <= {"127.0.0.1", *own}

    ran = tmp_path / "ran"
    for junk in (b"GET / HTTP/1.1\r\n\r\n", canary(ran), b""):
        host, port = machines.master.split(":")
        plain = machines.start(2, "-S", "-c", PLAIN, host, port, junk.hex())
        assert plain.communicate(timeout=60)[0] == "closed\n"
    assert "the tokens differ" in refused(machines.weft(2, *words, token="wrong"))
    relay = machines.start(2, "-c", RELAY, tmp_path, host, port)
    assert relay.stdout.readline() == "ready\n"
    through = f"{machines.bed.machines[2].address}:{PORT}"
    assert "another certificate" in refused(machines.weft(1, *words, master=through))

    before = rounds()
    assert becomes_true(lambda: rounds() > before)
    (tmp_path / "stop").touch()
    for process in group:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert not ran.exists()
    capture.kill()
    packets = wire.read_bytes()
    assert b"GET / HTTP/1.1" in packets
    assert TOKEN.encode() not in packets


def test_server_says_which_machine_has_another_token(machines: Machines, tmp_path: Path) -> None:
    words = ("serve", "--port", 0, "--ranks", 1, "--data", tmp_path / "data")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = machines.weft(0, *words[:2], port, *words[3:])

    def health() -> dict[str, Any]:
        asked = machines.start(0, "-S", "-c", HEALTH, f"http://127.0.0.1:{port}/health")
        return json.loads(asked.communicate(timeout=60)[0])

    assert becomes_true(lambda: health().get("status") == "starting", within=60)
    assert "the tokens differ" in refused(machines.weft(1, *words, token="wrong"))
    assert becomes_true(lambda: machines.bed.machines[1].address in health().get("reason", ""))
    other = machines.weft(1, *words)
    assert becomes_true(lambda: health().get("status") == "ok", within=120), server.communicate(timeout=1)
    own = {machine.address for machine in machines.bed.machines[:2]}
    assert addresses(server, other) <= {"127.0.0.1", *own}
    logs = []
    for process in (server, other):
        process.send_signal(signal.SIGTERM)
        logs.append(process.communicate(timeout=60)[1])
        assert process.returncode == 0, logs[-1]
    assert "the tokens differ" in logs[0]
