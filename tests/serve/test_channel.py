"""Channels: what is sent arrives, and what is not a frame of ours ends the connection."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from weft.core.errors import CommError, InputError
from weft.serve import channel as module
from weft.serve.channel import MOST_JSON, Channel, Closed, listen

TOKEN = "a token"


class Ends:
    """Makes both ends, and closes them."""

    def __init__(self) -> None:
        self.listener, self._stack = listen("127.0.0.1"), ExitStack()
        self._stack.enter_context(self.listener)

    def pair(self) -> tuple[Channel, Channel]:
        host, port = self.listener.getsockname()
        rank = Channel.connect(host, port, TOKEN)
        self._stack.callback(rank.close)
        return rank, self.accept()

    def raw(self, said: bytes = b'{"token":"a token"}') -> socket.socket:
        """An end that is ours to abuse."""
        there = self._stack.enter_context(socket.create_connection(self.listener.getsockname()))
        there.sendall(struct.pack("!II", len(said), 0) + said)
        return there

    def accept(self) -> Channel:
        channel = Channel.accept(self.listener.accept()[0], TOKEN)
        self._stack.callback(channel.close)
        return channel

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()


def test_messages_arrive_whole_and_in_order_from_many_threads(ends: Ends) -> None:
    rank, server = ends.pair()

    def send(thread: int) -> None:
        for i in range(20):
            rank.send({"thread": thread, "i": i, "text": "ä\n"}, bytes([thread]) * (i * 9973))

    threads = [threading.Thread(target=send, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    seen: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for _ in range(60):
        said, blob = server.receive()
        assert blob == bytes([said["thread"]]) * (said["i"] * 9973)
        assert said["text"] == "ä\n"
        seen[said["thread"]].append(said["i"])
    assert all(order == list(range(20)) for order in seen.values())
    for thread in threads:
        thread.join()


def test_both_ends_speak_and_hear_of_the_end(ends: Ends) -> None:
    rank, server = ends.pair()
    server.send({"do": "end"})
    assert rank.receive() == ({"do": "end"}, b"")
    rank.close()
    rank.close()
    with pytest.raises(Closed):
        server.receive()
    with pytest.raises(Closed):
        rank.send({})
    with pytest.raises(Closed):  # the first may still go into the buffers of a system
        for _ in range(50):
            server.send({}, bytes(2**20))


def test_a_close_wakes_the_thread_that_waits(ends: Ends) -> None:
    _, server = ends.pair()
    heard: list[BaseException] = []

    def wait() -> None:
        try:
            server.receive()
        except Closed as error:
            heard.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    server.close()
    thread.join(5)
    assert heard


@pytest.mark.parametrize("said", [b'{"token":"other"}', b'{"token":7}', b"{}", b"[]", b"\xff{", b""])
def test_a_peer_without_the_token_is_refused(ends: Ends, said: bytes) -> None:
    there = ends.raw(said)
    with pytest.raises(CommError):
        ends.accept()
    assert there.recv(1) == b""


def test_a_peer_without_the_token_gets_no_memory(ends: Ends) -> None:
    with socket.create_connection(ends.listener.getsockname()) as there:
        there.sendall(struct.pack("!II", 5, 2**31))
        with pytest.raises(CommError, match="2147483648 more"):
            ends.accept()


def test_a_silent_peer_is_not_waited_for(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    with socket.create_connection(ends.listener.getsockname()), pytest.raises(Closed, match="timed out"):
        ends.accept()


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("!II", 2, 0) + b"[]",
        struct.pack("!II", 3, 0) + b"\xff\xfe{",
        struct.pack("!II", 100_000, 0) + b"[" * 100_000,
        struct.pack("!II", MOST_JSON + 1, 0),
        struct.pack("!II", 2, 2**31 + 1),
    ],
)
def test_what_is_no_frame_ends_the_connection(ends: Ends, frame: bytes) -> None:
    there = ends.raw()
    server = ends.accept()
    there.sendall(frame)
    with pytest.raises(CommError) as caught:
        server.receive()
    assert not isinstance(caught.value, Closed)
    with pytest.raises(Closed):
        server.receive()


def test_half_a_frame_is_none(ends: Ends) -> None:
    there = ends.raw()
    server = ends.accept()
    there.sendall(struct.pack("!II", 2, 5) + b"{}123")
    there.close()
    with pytest.raises(Closed):
        server.receive()


def test_what_is_too_long_or_no_number_is_not_sent(ends: Ends) -> None:
    rank, server = ends.pair()
    with pytest.raises(InputError, match="bytes of JSON"):
        rank.send({"text": "x" * MOST_JSON})
    with pytest.raises(ValueError, match="JSON"):
        rank.send({"seconds": float("nan")})
    rank.send({"told": "still here"})
    assert server.receive()[0] == {"told": "still here"}


def test_nobody_listens() -> None:
    with listen("127.0.0.1") as gone:
        port = gone.getsockname()[1]
    with pytest.raises(Closed, match=f"127.0.0.1:{port}"):
        Channel.connect("127.0.0.1", port, TOKEN)
