"""Host: one server from its first connection to its last: the socket, slow clients, signals, the end.

    listener = bind("127.0.0.1", 8000)
    host(engine, create_app(engine, limits=Limits()), listener, ready=lambda: print("ready"))

Binding comes first: a port that is taken is told before anything is started.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import signal
import socket
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.core.errors import CommError, InputError
from weft.serve.app import server_config
from weft.serve.errors import by_status

HEAD_SECONDS = 10.0
"""In which the head of a request must have come, from the connection or the answer before."""
MAX_IDLE_CONNECTIONS = 256
"""Connections that wait for the head of a request; one more closes the oldest, or a flood of them would take
every descriptor. Twice the backlog, so that a head that came with its connection is read before."""
STUCK_SECONDS = 60
"""A client that takes nothing of an answer for so long is gone."""
GRACE_SECONDS = 20.0
"""For what runs, after a signal; less than the 30 that orchestrators give."""
LEAVE_SECONDS = 3
"""For connections, once nothing runs any more."""
LOOK_SECONDS = 0.1
_log = logging.getLogger("weft.serve")


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is a free one."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _no_place(host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections have it from their listener
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * STUCK_SECONDS)
        listener.bind(address)
        listener.listen()  # or another could still take the port, which does not show before this
    except OSError as error:
        listener.close()
        raise _no_place(host, port, error) from error
    return listener


def _no_place(host: str, port: int, error: OSError) -> InputError:
    return InputError(
        f"The server cannot listen at {host}:{port}: {error.strerror or error}.",
        hint="Give a --host of this machine and a --port that is free; 0 finds one.",
    )


def address(listener: socket.socket) -> str:
    """As a browser takes it; one that listens everywhere answers at this machine's own address too."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, str(host))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Protocol(H11Protocol):
    """uvicorn waits for the head of a request for ever, and answers what is no HTTP in words of its own."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle: dict[Protocol, None] = self.server_state.__dict__.setdefault("idle", {})
        self._expect()

    @property
    def _is_waiting(self) -> bool:
        """Whether no request is being answered; the rest of a body that was refused is none."""
        return self.cycle is None or self.cycle.response_complete

    def handle_events(self) -> None:
        super().handle_events()
        if not self._is_waiting:
            self._idle.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head.cancel()
        self._idle.pop(self, None)
        super().connection_lost(exc)

    def _expect(self) -> None:
        if hasattr(self, "_head"):
            self._head.cancel()
        self._head = self.loop.call_later(HEAD_SECONDS, self._late)
        self._idle.pop(self, None)
        if self._is_waiting:
            self._idle[self] = None
        if len(self._idle) > MAX_IDLE_CONNECTIONS:
            oldest = next((each for each in self._idle if not each._has_input()), None)
            if oldest is not None:
                del self._idle[oldest]
                oldest._late()

    def _has_input(self) -> bool:
        """Whether bytes have come that were not read yet.

        A flood is accepted by the hundred, before any of it is read: a request among them is not idle.
        """
        ready = select.poll()
        ready.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(ready.poll(0))

    def _late(self) -> None:
        if self._is_waiting and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - uvicorn's words
        body = json.dumps(by_status(400, "That is not an HTTP/1.1 request.").body()).encode()
        head = [
            ("Content-Type", "application/json"),
            ("Content-Length", str(len(body))),
            ("Connection", "close"),
        ]
        with suppress(h11.LocalProtocolError):  # an answer was under way
            for event in (
                h11.Response(status_code=400, headers=head),
                h11.Data(data=body),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


class _Server(uvicorn.Server):
    """Signals are ours: the first drains, and uvicorn would close its door to those who wait."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def host(
    engine: Any,
    app: Any,
    listener: socket.socket,
    *,
    ready: Callable[[], object],
    grace: float = GRACE_SECONDS,
) -> None:
    """Serve until a signal. What runs then is finished, or after `grace` seconds stopped, and kept."""
    name, port = listener.getsockname()[:2]
    config = server_config(app, host=name, port=port)
    config.http, config.ws, config.lifespan = Protocol, "none", "off"
    config.timeout_graceful_shutdown = LEAVE_SECONDS
    asyncio.run(_host(engine, _Server(config), listener, ready, grace))


async def _host(engine: Any, server: _Server, listener: socket.socket, ready: Any, grace: float) -> None:
    asked = _signals(grace)
    engine.start()
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    starting, stopping = asyncio.ensure_future(_started(engine)), asyncio.ensure_future(asked.wait())
    try:
        await asyncio.wait({starting, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            ready()
            await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.to_thread(engine.drain, grace)
    finally:
        starting.cancel()
        stopping.cancel()
        server.handle_exit(signal.SIGTERM, None)  # as if by a signal: streams of events listen for this
        await asyncio.wait({serving})
        await asyncio.to_thread(engine.close)
    serving.result()


def _signals(grace: float) -> asyncio.Event:
    """Set by the first signal; a second ends all at once: jobs are on the disk, ranks end with us."""
    asked = asyncio.Event()

    def stop(number: signal.Signals) -> None:
        if asked.is_set():
            os._exit(128 + number)
        asked.set()
        _log.info("draining", extra={"signal": number.name, "grace_seconds": grace})

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return asked


async def _started(engine: Any) -> None:
    """Until the ranks are ready; those that can not load the model do not get better by waiting."""
    while (state := engine.status()) != "ok":
        if state == "failed":
            raise CommError(f"The ranks do not start. {engine.trouble}".strip())
        await asyncio.sleep(LOOK_SECONDS)


def log_events(engine: Any, *, prompts: bool) -> None:
    """A line for each job that ends and each time that ranks are lost; prompts only for who asks for them."""

    def hear(what: str, said: dict[str, Any]) -> None:
        if what == "restart":
            _log.warning("ranks are started again", extra={"reason": said.get("reason")})
        elif what == "job_ended" and (job := said.get("job")) is not None:
            about = {"job": job.id, "status": job.status, "timings": job.timings, "bytes": job.size}
            about |= {"prompt": job.asked.prompt} if prompts else {}
            about |= {"code": job.failure.code, "why": job.failure.message} if job.failure else {}
            _log.info("job ended", extra=about)

    engine.on_event.append(hear)
