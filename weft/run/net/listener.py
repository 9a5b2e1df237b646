"""Listener: accept connections, authenticate them, and pass each to the handler of its purpose."""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from weft.core.errors import CommError, InputError
from weft.run.net.channel import Channel, shutdown
from weft.run.net.secure import MISMATCH, Credentials, ProofError, accept

MAX_PENDING = 64
"""Connections that are not authenticated yet."""
MAX_CARRIED = 1024
"""Connections of one tunnel; a rank needs a few."""
CLOSED = (errno.EBADF, errno.EINVAL)
EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
EXHAUSTED_PAUSE_SECONDS = 0.1
REFUSAL_SECONDS = 60.0
"""For which `Listener.refusal` reports the last connection that was refused."""
Handler = Callable[[Channel], object]
_log = logging.getLogger("weft.run")


def listen(address: tuple[str, int] | Path) -> socket.socket:
    """Return a socket that listens at (host, port), port 0 for a free one, or at a unix socket's path."""
    try:
        if isinstance(address, Path):
            with ExitStack() as on_error:
                listener = on_error.enter_context(socket.socket(socket.AF_UNIX))
                listener.bind(str(address))
                listener.listen(128)
                on_error.pop_all()
                return listener
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        return socket.create_server(address, family=family, backlog=128)
    except OSError as error:
        name = address if isinstance(address, Path) else f"{address[0]}:{address[1]}"
        raise InputError(
            f"Cannot listen at {name}: {error.strerror or error}.",
            hint="--master must be an address of machine 0 with a free port.",
        ) from error


class Listener:
    """Serve each connection in a thread, which authenticates it and calls `handlers[purpose](channel)`.

    At most `MAX_PENDING` connections are unauthenticated. One more drops the oldest of the address that has
    most, so a flood from one machine does not shut out another.
    """

    def __init__(
        self, listening: socket.socket, credentials: Credentials, handlers: Mapping[str, Handler]
    ) -> None:
        self.socket, self.credentials, self.handlers = listening, credentials, handlers
        self._pending: dict[socket.socket, str] = {}
        self._lock = threading.Lock()
        self._refused = (float("-inf"), "")
        _accept_all(listening, self._take, "weft-accept")

    @property
    def port(self) -> int:
        return self.socket.getsockname()[1]

    @property
    def refusal(self) -> str:
        """The reason of the last refusal, for `REFUSAL_SECONDS` after it."""
        when, reason = self._refused
        return reason if time.monotonic() - when < REFUSAL_SECONDS else ""

    def close(self) -> None:
        shutdown(self.socket)  # wakes the thread that waits in accept(), which closing does not
        self.socket.close()
        with self._lock:
            for connection in self._pending:
                shutdown(connection)

    def _take(self, connection: socket.socket, peer: tuple[str, int] | str) -> None:
        self._admit(connection, peer[0] if isinstance(peer, tuple) else "this machine")
        try:
            threading.Thread(target=self._serve, args=(connection,), name="weft-peer", daemon=True).start()
        except RuntimeError:  # no more threads: it must not hold a place
            with self._lock:
                self._pending.pop(connection, None)
            raise

    def _admit(self, connection: socket.socket, source: str) -> None:
        with self._lock:
            if len(self._pending) >= MAX_PENDING:
                crowd = Counter(self._pending.values()).most_common(1)[0][0]
                oldest = next(each for each, its in self._pending.items() if its == crowd)
                shutdown(oldest)  # its own thread closes it
                del self._pending[oldest]
            self._pending[connection] = source

    def _note(self, refusal: str) -> None:
        when, previous = self._refused
        now = time.monotonic()
        self._refused = now, refusal
        if refusal != previous or now - when > REFUSAL_SECONDS:  # a flood is one line of the log
            _log.warning(refusal)

    def _serve(self, connection: socket.socket) -> None:
        source = self._pending.get(connection, "")
        try:
            channel, purpose = accept(connection, self.credentials)
        except (CommError, RuntimeError) as error:  # no proof, or no thread for its timer
            connection.close()
            if isinstance(error, ProofError):
                self._note(f"A connection from {source} was refused: {MISMATCH}.")
            return
        finally:
            with self._lock:
                self._pending.pop(connection, None)
        try:
            if (handler := self.handlers.get(purpose)) is not None:
                handler(channel)
        except (CommError, OSError):
            pass  # the peer is gone
        finally:
            channel.close()


class Tunnel:
    """A port on loopback whose connections are carried over channels that `connect` opens.

    Clients of `torch.distributed.TCPStore` reach a store on another machine through it. The store has neither
    TLS nor tokens, and so listens on loopback only.
    """

    def __init__(self, connect: Callable[[], Channel]) -> None:
        self._connect = connect
        self._places = threading.Semaphore(MAX_CARRIED)
        self._socket = listen(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        _accept_all(self._socket, self._take, "weft-tunnel")

    def close(self) -> None:
        shutdown(self._socket)
        self._socket.close()

    def _take(self, connection: socket.socket, _: Any) -> None:
        if self._places.acquire(blocking=False):
            threading.Thread(target=self._carry, args=(connection,), daemon=True).start()
        else:
            connection.close()

    def _carry(self, connection: socket.socket) -> None:
        with suppress(CommError):
            forward(connection, self._connect().socket)
        connection.close()
        self._places.release()


def forward(one: Any, other: Any) -> None:
    """Copy bytes in both directions until either end closes, then close both."""
    back = threading.Thread(target=_copy, args=(other, one), daemon=True)
    back.start()
    _copy(one, other)
    back.join()
    one.close()
    other.close()


def _copy(source: Any, target: Any) -> None:
    with suppress(OSError):
        while data := source.recv(2**16):
            target.sendall(data)
    for end in (source, target):
        shutdown(end)


def _accept_all(listening: socket.socket, take: Callable[[socket.socket, Any], None], name: str) -> None:
    """Call `take(connection, peer)` for each connection, in a thread, until the socket is closed."""

    def accept_all() -> None:
        while True:
            try:
                connection, peer = listening.accept()
            except OSError as error:
                if error.errno in CLOSED:
                    return
                if error.errno in EXHAUSTED:  # goes by; connections that wait keep their place
                    time.sleep(EXHAUSTED_PAUSE_SECONDS)
                continue
            try:
                take(connection, peer)
            except RuntimeError:  # no more threads
                connection.close()

    threading.Thread(target=accept_all, name=name, daemon=True).start()
