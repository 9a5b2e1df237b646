"""Connections between processes prove themselves first: who is let in, who is refused, what travels."""

from __future__ import annotations

import os
import resource
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from tests.worlds import becomes_true
from weft.core.errors import CommError, InputError
from weft.run.net import interfaces, secure
from weft.run.net import listener as listeners
from weft.run.net.channel import Channel, Closed
from weft.run.net.listener import Listener, Tunnel, forward, listen
from weft.run.net.scratch import scratch
from weft.run.net.secure import Credentials, ProofError, accept, connect
from weft.run.net.tls import Certificate, self_signed, server_context

TOKEN, OTHER = "a-secret-of-all-machines", "a-secret-of-somebody-else"


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.of(TOKEN, self_signed(tmp_path_factory.mktemp("tls")))


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Echo:
    """A listener whose connections get back what they send."""

    def __init__(self, credentials: Credentials, address: tuple[str, int] | Path = ("127.0.0.1", 0)) -> None:
        self.listener = Listener(listen(address), credentials, {"echo": self._echo})
        self.address = str(address) if isinstance(address, Path) else ("127.0.0.1", self.listener.port)

    @staticmethod
    def _echo(channel: Channel) -> None:
        while True:
            channel.send(*channel.receive())

    def works(self) -> bool:
        channel = connect(self.address, TOKEN, "echo")
        channel.send({"n": 1}, b"x")
        answer = channel.receive()
        channel.close()
        return answer == ({"n": 1}, b"x")


@pytest.fixture(params=["unix", "tls"])
def echo(request: pytest.FixtureRequest, credentials: Credentials, stack: ExitStack) -> Echo:
    if request.param == "tls":
        found = Echo(credentials)
    else:
        found = Echo(Credentials(TOKEN), stack.enter_context(scratch("test")) / "echo")
    stack.callback(found.listener.close)
    return found


def test_both_ends_that_know_the_token_talk(echo: Echo) -> None:
    assert echo.works()


def test_wrong_token_is_refused_and_told_on_both_sides(echo: Echo) -> None:
    with pytest.raises(ProofError, match="the tokens differ"):
        connect(echo.address, OTHER, "echo", patience=60)  # at once: it does not get better
    assert becomes_true(lambda: "the tokens differ" in echo.listener.refusal)
    assert echo.works()


def test_server_that_does_not_know_the_token_is_refused(stack: ExitStack) -> None:
    """It cannot prove itself, even if it accepts every proof."""
    one, other = socket.socketpair()
    stack.callback(other.close)

    def impostor() -> None:
        channel = Channel(other)
        channel.send({"weft": 1, "nonce": "00" * 32})
        channel.receive()
        channel.send({"proof": "00" * 32})

    threading.Thread(target=impostor, daemon=True).start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure.socket.socket, "connect", lambda *_: None)
        patch.setattr(secure.socket, "socket", lambda *_: one)
        with pytest.raises(ProofError, match="does not have the token"):
            secure._connect("/nowhere", TOKEN, "echo")


def test_relay_with_another_certificate_is_refused(
    credentials: Credentials, stack: ExitStack, tmp_path: Path
) -> None:
    """A machine in the middle ends TLS and passes every byte on: the proofs are of two certificates."""
    echo = Echo(credentials)
    stack.callback(echo.listener.close)
    context = server_context(self_signed(tmp_path))
    middle = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    assert isinstance(echo.address, tuple)

    def relay() -> None:
        from weft.run.net.tls import TLSSocket, client_context

        client = TLSSocket(middle.accept()[0], context, server=True)
        client.handshake()
        server = TLSSocket(socket.create_connection(echo.address), client_context(), server=False)
        server.handshake()
        forward(client, server)

    threading.Thread(target=relay, daemon=True).start()
    with pytest.raises(ProofError):
        connect(middle.getsockname(), TOKEN, "echo")
    assert becomes_true(lambda: "certificate" in echo.listener.refusal)
    assert echo.works()


CANARY = b"\x80\x04c__builtin__\nexec\n(Vraise SystemExit\ntR."


@pytest.mark.parametrize(
    "junk", [b"", b"GET / HTTP/1.1\r\n\r\n", CANARY, bytes(64), struct.pack("!II", 5, 2**31), b"\x16\x03\x01"]
)
def test_plain_bytes_are_refused_without_memory(echo: Echo, junk: bytes, monkeypatch) -> None:
    monkeypatch.setattr(secure, "HANDSHAKE_SECONDS", 0.3)
    family = socket.AF_UNIX if isinstance(echo.address, str) else socket.AF_INET
    with socket.socket(family) as there:
        there.connect(echo.address)
        there.sendall(junk)
        there.settimeout(20)
        with suppress(ConnectionResetError):
            while there.recv(4096):  # what a server says first; then the end
                pass
    monkeypatch.undo()
    assert echo.works()


def test_drip_of_bytes_does_not_hold_a_connection(echo: Echo, monkeypatch) -> None:
    monkeypatch.setattr(secure, "HANDSHAKE_SECONDS", 0.3)
    family = socket.AF_UNIX if isinstance(echo.address, str) else socket.AF_INET
    with socket.socket(family) as there:
        there.connect(echo.address)
        there.settimeout(0.05)
        ended = False
        for _ in range(400):
            try:
                there.sendall(b"\0")
                ended = there.recv(4096) == b""
            except TimeoutError:
                continue
            except OSError:
                ended = True
            if ended:
                break
        assert ended


def test_flood_drops_the_oldest_of_the_crowd_and_lets_others_in(echo: Echo, stack: ExitStack) -> None:
    family = socket.AF_UNIX if isinstance(echo.address, str) else socket.AF_INET
    for _ in range(4 * listeners.MAX_PENDING):
        there = stack.enter_context(socket.socket(family))
        there.connect(echo.address)
    assert echo.works()
    assert len(echo.listener._pending) <= listeners.MAX_PENDING


FLOOD = """
import resource, socket, sys, threading, time
from pathlib import Path
from weft.run.net import listener as module
from weft.run.net.listener import Listener, listen
from weft.run.net.secure import Credentials, connect
address = Path(sys.argv[1])
def echo(channel):
    while True: channel.send(*channel.receive())
module.MAX_PENDING = 10**6
listener = Listener(listen(address), Credentials("a-token-of-tests"), {"echo": echo})
resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60))
crowd = []
try:
    while True:
        there = socket.socket(socket.AF_UNIX); crowd.append(there); there.connect(str(address))
except OSError as error:
    print(error.errno)
time.sleep(0.3)
for there in crowd: there.close()
channel = connect(str(address), "a-token-of-tests", "echo", patience=20)
channel.send({"n": 1}); print(channel.receive()[0]["n"])
"""


def test_listener_survives_running_out_of_descriptors(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FLOOD, str(tmp_path / "s")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
    assert done.stdout.split() == ["24", "1"], done.stderr  # EMFILE; then it accepts again
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 60


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(Closed, match=f"127.0.0.1:{port}"):
        connect(("127.0.0.1", port), TOKEN, "echo")


def test_address_that_cannot_be_listened_at_is_told(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for address in (taken.getsockname(), ("192.0.2.1", 0), tmp_path / "none" / "there"):
            with pytest.raises(InputError, match="Cannot listen at"):
                listen(address)


def test_token_is_in_no_byte_that_travels(credentials: Credentials, stack: ExitStack) -> None:
    """Neither over TLS nor, what a relay would see, inside of it."""
    seen: list[bytes] = []
    one, other = socket.socketpair()
    theirs, ours = socket.socketpair()

    def copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):  # closed at the end of the test
            while data := source.recv(4096):
                seen.append(data)
                target.sendall(data)

    for pair in ((other, theirs), (theirs, other)):
        threading.Thread(target=copy, args=pair, daemon=True).start()
    done = threading.Thread(target=lambda: accept(ours, Credentials(TOKEN)), daemon=True)
    done.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure.socket.socket, "connect", lambda *_: None)
        patch.setattr(secure.socket, "socket", lambda *_: one)
        channel = secure._connect("/nowhere", TOKEN, "echo")
    done.join()
    channel.close()
    wire = b"".join(seen)
    assert b"proof" in wire
    assert TOKEN.encode() not in wire
    for each in (other, theirs, ours):
        each.close()


def test_tunnel_carries_a_store_to_another_machine(credentials: Credentials, stack: ExitStack) -> None:
    from weft.run.net.stores import open_store, serve_store

    with listen(("127.0.0.1", 0)) as listening:
        store, port = serve_store(listening), listening.getsockname()[1]

    def reach(channel: Channel) -> None:
        forward(socket.create_connection(("127.0.0.1", port)), channel.socket)

    far = Listener(listen(("127.0.0.1", 0)), credentials, {"store": reach})
    tunnel = Tunnel(lambda: connect(("127.0.0.1", far.port), TOKEN, "store"))
    stack.callback(far.close)
    stack.callback(tunnel.close)
    client = open_store(tunnel.port)
    client.set("name", "weft")
    assert store.get("name") == b"weft"
    assert client.add("n", 2) == 2
    store.set("large", "x" * 300_000)
    assert len(client.get("large")) == 300_000


def test_certificates_of_the_user_are_checked(tmp_path: Path) -> None:
    made = self_signed(tmp_path)
    assert made.key.stat().st_mode & 0o077 == 0
    server_context(made)
    (tmp_path / "other").mkdir()
    other = self_signed(tmp_path / "other")
    for cert, key in ((made.cert, other.key), (made.cert, tmp_path / "none"), (made.key, made.key)):
        with pytest.raises(InputError, match="cannot be used"):
            server_context(Certificate(cert=cert, key=key))


def test_private_key_with_a_password_is_refused_and_not_asked_for(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    made = self_signed(tmp_path)
    key = serialization.load_pem_private_key(made.key.read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"a password")
    pem, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    made.key.write_bytes(key.private_bytes(pem, form, locked))
    with pytest.raises(InputError, match="cannot be used") as caught:
        server_context(made)
    assert isinstance(caught.value.__cause__, ssl.SSLError)  # another error: there was no terminal to ask at


def test_interface_is_that_of_the_master_or_the_named_one() -> None:
    known = interfaces.addresses()
    assert "127.0.0.1" in known["lo"]
    assert interfaces.choose("127.0.0.1", "", is_master=True) == ("lo", "127.0.0.1")
    assert interfaces.choose("localhost", "", is_master=False)[0] == "lo"
    assert interfaces.choose("192.0.2.7", "lo", is_master=True) == ("lo", "127.0.0.1")
    assert interfaces.choose("nothere.invalid", "lo", is_master=True) == ("lo", "127.0.0.1")
    with pytest.raises(InputError, match="No interface"):
        interfaces.choose("192.0.2.7", "", is_master=True)
    assert interfaces.environment("eth0") == {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "=eth0"}


ORPHAN = """
import os, signal
from weft.run.net.scratch import make_scratch
folder, _ = make_scratch("orphan"); (folder / "store").touch(); print(folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folder_of_a_killed_process_is_removed_by_the_next(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    monkeypatch.setattr("weft.run.net.scratch.MAX_ROOT_BYTES", 1000)
    code = "import weft.run.net.scratch as s; s.MAX_ROOT_BYTES = 1000" + ORPHAN
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment,
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    left = Path(done.stdout.strip())
    assert left.is_dir()
    strangers = tmp_path / "weft-my-venv"  # as some virtual environments have it
    strangers.mkdir()
    (strangers / ".lock").touch()
    (tmp_path / "weft-run-abcdefgh").mkdir()  # one that is being made has no lock yet
    with scratch("test") as held:
        assert not left.exists()
        assert held.stat().st_mode & 0o077 == 0
        with scratch("test"):
            assert held.is_dir()  # its owner lives
    assert not held.exists()
    assert (strangers / ".lock").exists()
    assert (tmp_path / "weft-run-abcdefgh").is_dir()


def test_handshake_that_fails_is_an_error_of_weft(stack: ExitStack) -> None:
    one, other = socket.socketpair()
    one.close()
    with pytest.raises(CommError):
        accept(other, Credentials(TOKEN))
