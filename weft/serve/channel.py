"""Channel: JSON with bytes over a socket, between the server and a rank.

    rank:    channel = Channel.connect("127.0.0.1", port, token); channel.send({"told": "hello"})
    server:  listener = listen("127.0.0.1"); channel = Channel.accept(listener.accept()[0], token)
             said, blob = channel.receive()

A frame is 4 bytes of how long the JSON is, 4 of how long the blob is, the JSON and the blob. What is not
a frame, not an object or too long ends the connection; nothing is ever unpickled.
"""

from __future__ import annotations

import hmac
import json
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weft.core.errors import CommError, InputError

HEAD = struct.Struct("!II")
MOST_JSON, MOST_BLOB = 2**20, 2**31
MOST_TOKEN = 4096
"""Of a peer that has not yet shown its token nothing longer is read."""
PATIENCE = 10.0
"""Seconds to connect, and to show a token."""
STUCK = 10.0
"""Seconds in which a rank takes nothing of what it is sent: it is given up, or the server would wait too."""


class Closed(CommError):  # noqa: N818 - the end of a connection is not always an error
    """The other end is gone, or this one was closed."""


def listen(host: str, port: int = 0) -> socket.socket:
    """Where ranks connect to; port 0 is a free one: `listener.getsockname()[1]`."""
    try:
        return socket.create_server((host, port), backlog=128)
    except OSError as error:
        raise InputError(
            f"Ranks cannot be waited for at {host}:{port}: {error.strerror or error}.",
            hint="--master is an address of machine 0, whose next port must be free too.",
        ) from error


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._lock = connection, threading.Lock()
        self._socket.settimeout(None)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A machine that was cut off sends no end; others are noticed at once.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)

    @classmethod
    def connect(cls, host: str, port: int, token: str) -> Channel:
        try:
            channel = cls(socket.create_connection((host, port), timeout=PATIENCE))
        except OSError as error:
            raise Closed(f"No server answers at {host}:{port}: {error}.") from error
        channel.send({"token": token})
        return channel

    @classmethod
    def accept(cls, connection: socket.socket, token: str) -> Channel:
        """Of a connection just accepted; its peer must show the token, and soon."""
        channel = cls(connection)
        connection.settimeout(PATIENCE)
        try:
            shown = channel.receive(most=(MOST_TOKEN, 0))[0].get("token")
            if not isinstance(shown, str) or not hmac.compare_digest(shown.encode(), token.encode()):
                raise CommError("A connection showed another token than this server's ranks have.")
        except BaseException:
            channel.close()
            raise
        connection.settimeout(None)
        wait = struct.pack("ll", int(STUCK), int(STUCK % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)
        return channel

    def send(self, said: Mapping[str, Any], blob: bytes = b"") -> None:
        """Returns when all of it was handed to the system."""
        text = json.dumps(said, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > MOST_JSON or len(blob) > MOST_BLOB:
            raise InputError(
                f"A message has {len(text)} bytes of JSON and {len(blob)} more.",
                hint=f"A channel takes {MOST_JSON} and {MOST_BLOB}.",
            )
        with self._lock:
            try:
                self._socket.sendall(HEAD.pack(len(text), len(blob)) + text)
                if blob:
                    self._socket.sendall(blob)
            except OSError as error:
                self.close()  # half a frame may be under way
                raise Closed(f"The other end of a channel is gone: {error}.") from error

    def receive(self, most: tuple[int, int] = (MOST_JSON, MOST_BLOB)) -> tuple[dict[str, Any], bytes]:
        """The next message; `Closed` if there is none any more."""
        text, blob = HEAD.unpack(self._read(HEAD.size))
        try:
            if text > most[0] or blob > most[1]:
                raise CommError(f"A frame has {text} bytes of JSON and {blob} more; at most {most} may be.")
            said = json.loads(self._read(text))
            if not isinstance(said, dict):
                raise CommError(f"A frame has a {type(said).__name__}; it must be an object.")
            return said, bytes(self._read(blob))
        except (CommError, ValueError, RecursionError) as error:
            self.close()
            raise (
                error if isinstance(error, CommError) else CommError(f"A frame is no JSON: {error}.")
            ) from error

    def close(self) -> None:
        """Ends both directions; whoever waits in `receive`, here or there, hears of it."""
        with suppress(OSError):  # it was closed, by us or them
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, size: int) -> bytearray:
        # Grown as it comes: a head that promises 2 GiB costs its sender 2 GiB too.
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(min(size - len(data), 2**20))
            except OSError as error:
                raise Closed(f"A channel ended: {error}.") from error
            if not part:
                raise Closed("The other end of a channel is gone.")
            data += part
        return data
