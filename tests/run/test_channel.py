"""Channels: what is sent arrives, over unix sockets and TLS; what is not a frame ends the connection."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.core.errors import CommError, InputError
from weft.run.net.channel import MAX_JSON_BYTES, Channel, Closed
from weft.run.net.secure import Credentials, accept, connect
from weft.run.net.tls import self_signed

TOKEN = "a token of some length"


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    return Credentials.of(TOKEN, self_signed(tmp_path_factory.mktemp("tls")))


@pytest.fixture(params=["pair", "tls"])
def pair(request: pytest.FixtureRequest, credentials: Credentials) -> Iterator[tuple[Channel, Channel]]:
    """Two ends of a connection, plain or TLS."""
    if request.param == "pair":
        ends = [Channel(each) for each in socket.socketpair()]
    else:
        ends = []
        with socket.create_server(("127.0.0.1", 0)) as listener:
            thread = threading.Thread(
                target=lambda: ends.append(accept(listener.accept()[0], credentials)[0]), daemon=True
            )
            thread.start()
            ends = [connect(listener.getsockname(), TOKEN, "test"), *(thread.join() or ends)]
    yield ends[0], ends[1]
    for end in ends:
        end.close()


@pytest.fixture
def raw() -> Iterator[tuple[socket.socket, Channel]]:
    """An end that is ours to abuse, and the channel at the other."""
    one, other = socket.socketpair()
    channel = Channel(other)
    yield one, channel
    one.close()
    channel.close()


def test_messages_arrive_whole_and_in_order_while_both_ends_send(pair: tuple[Channel, Channel]) -> None:
    def send(end: Channel, thread: int) -> None:
        for i in range(20):
            end.send({"thread": thread, "i": i, "text": "ä\n"}, bytes([thread]) * (i * 9973))

    threads = [threading.Thread(target=send, args=(end, i)) for end in pair for i in range(3)]
    for thread in threads:
        thread.start()
    for end in pair:
        seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
        for _ in range(60):
            message, payload = end.receive()
            assert payload == bytes([message["thread"]]) * (message["i"] * 9973)
            assert message["text"] == "ä\n"
            seen[message["thread"]].append(message["i"])
        assert all(order == list(range(20)) for order in seen.values())
    for thread in threads:
        thread.join()


def test_large_payloads_cross_in_both_directions_at_once(pair: tuple[Channel, Channel]) -> None:
    """More than all buffers hold: each end must be able to read while its own send is under way."""
    payload = bytes(range(256)) * 2**15
    threads = [threading.Thread(target=end.send, args=({}, payload)) for end in pair]
    for thread in threads:
        thread.start()
    got: list[bytes] = []
    readers = [threading.Thread(target=lambda end=end: got.append(end.receive()[1])) for end in pair]
    for thread in [*readers]:
        thread.start()
    for thread in [*threads, *readers]:
        thread.join(60)
    assert got == [payload, payload]


def test_both_ends_hear_of_the_end(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    other.send({"do": "end"})
    assert one.receive() == ({"do": "end"}, b"")
    one.close()
    one.close()
    with pytest.raises(Closed):
        other.receive()
    with pytest.raises(Closed):
        one.send({})
    with pytest.raises(Closed):  # the first may still go into the buffers of a system
        for _ in range(50):
            other.send({}, bytes(2**20))


def test_close_wakes_the_thread_that_waits(pair: tuple[Channel, Channel]) -> None:
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            pair[1].receive()
        except Closed as error:
            heard.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    pair[1].close()
    thread.join(5)
    assert heard


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 3, 0) + b"\xff\xfe{",
        struct.pack("!II", 100_000, 0) + b"[" * 100_000,
        struct.pack("!II", MAX_JSON_BYTES + 1, 0),
        struct.pack("!II", 2, 2**31 + 1),
        struct.pack("!II", 19, 0) + b"\x80\x04cos\nsystem\n(V:\ntR.",
    ],
)
def test_malformed_frame_ends_the_connection(raw: tuple[socket.socket, Channel], frame: bytes) -> None:
    raw[0].sendall(frame)
    with pytest.raises(CommError) as caught:
        raw[1].receive()
    assert not isinstance(caught.value, Closed)
    with pytest.raises(Closed):
        raw[1].receive()


def test_half_a_frame_is_none(raw: tuple[socket.socket, Channel]) -> None:
    raw[0].sendall(struct.pack("!II", 2, 5) + b"{}123")
    raw[0].close()
    with pytest.raises(Closed):
        raw[1].receive()


def test_unsendable_messages_raise_and_leave_the_channel_intact(pair: tuple[Channel, Channel]) -> None:
    one, other = pair
    with pytest.raises(InputError, match="bytes of JSON"):
        one.send({"text": "x" * MAX_JSON_BYTES})
    with pytest.raises(ValueError, match="JSON"):
        one.send({"seconds": float("nan")})
    one.send({"told": "still here"})
    assert other.receive()[0] == {"told": "still here"}


def test_peer_that_takes_nothing_is_given_up(raw: tuple[socket.socket, Channel], tmp_path: Path) -> None:
    raw[1].limit_sends(0.1)
    with pytest.raises(Closed):
        raw[1].send({}, bytes(2**26))
