"""Channel: framed JSON messages with binary payloads over a connected stream socket.

A frame is the length of the JSON (4 bytes), the length of the payload (4 bytes), the JSON object and the
payload. Anything else ends the connection, and nothing is unpickled. `weft.run.net.secure` returns channels
to peers that have proved that they have the token.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weft.core.errors import CommError, InputError

HEADER = struct.Struct("!II")
MAX_JSON_BYTES, MAX_PAYLOAD_BYTES = 2**20, 2**31
SEND_TIMEOUT_SECONDS = 10.0
"""A peer that takes no byte for so long counts as lost: the sender must not wait for ever."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 25_000}
"""Seconds, probes and milliseconds: a machine that was cut off sends no end of its connections."""


class Closed(CommError):  # noqa: N818 - the end of a connection is not always an error
    """The peer closed the connection, or this end was closed."""


class Channel:
    """One end of a connection. Any thread may send; one thread receives.

    `connection` is a socket, or a `weft.run.net.tls.TLSSocket`, which has the same methods.
    """

    def __init__(self, connection: Any) -> None:
        self.socket = connection
        self._lock = threading.Lock()
        connection.settimeout(None)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def limit_sends(self, seconds: float | None = None) -> None:
        """Raise `Closed` in `send` when the peer takes nothing for `seconds`."""
        seconds = SEND_TIMEOUT_SECONDS if seconds is None else seconds
        wait = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, wait)

    def send(self, message: Mapping[str, Any], payload: bytes = b"") -> None:
        """Return when the operating system has taken the whole frame."""
        text = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > MAX_JSON_BYTES or len(payload) > MAX_PAYLOAD_BYTES:
            raise InputError(
                f"A message has {len(text)} bytes of JSON and a payload of {len(payload)} bytes.",
                hint=f"A channel takes at most {MAX_JSON_BYTES} and {MAX_PAYLOAD_BYTES}.",
            )
        with self._lock:
            try:
                self.socket.sendall(HEADER.pack(len(text), len(payload)) + text)
                if payload:
                    self.socket.sendall(payload)
            except OSError as error:
                self.close()  # half a frame may be under way
                raise Closed(f"The peer of a channel is gone: {error}.") from error

    def receive(
        self, limits: tuple[int, int] = (MAX_JSON_BYTES, MAX_PAYLOAD_BYTES)
    ) -> tuple[dict[str, Any], bytes]:
        """Return the next message and its payload; raise `Closed` at the end of the connection."""
        text, payload = HEADER.unpack(self._read(HEADER.size))
        try:
            if text > limits[0] or payload > limits[1]:
                sizes = f"{text} bytes of JSON and {payload} of payload"
                raise CommError(f"A frame has {sizes}; at most {limits} are allowed.")
            message: dict[str, Any] = json.loads(self._read(text))
            if type(message) is not dict:
                raise CommError(f"A frame must hold an object, got {type(message).__name__}.")
            return message, bytes(self._read(payload))
        except (CommError, ValueError, RecursionError) as error:
            self.close()
            if isinstance(error, CommError):
                raise
            raise CommError(f"A frame is not JSON: {error}.") from error

    def close(self) -> None:
        """End both directions and wake the threads that wait in `receive`, here and at the peer."""
        shutdown(self.socket)
        self.socket.close()

    def _read(self, size: int) -> bytearray:
        # Grown as it arrives: a header that promises 2 GiB costs its sender 2 GiB too.
        data = bytearray()
        while len(data) < size:
            try:
                chunk = self.socket.recv(min(size - len(data), 2**20))
            except OSError as error:
                raise Closed(f"A channel ended: {error}.") from error
            if not chunk:
                raise Closed("The peer of a channel is gone.")
            data += chunk
        return data


def shutdown(connection: Any) -> None:
    """End both directions of a connection that either end may have closed already."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
