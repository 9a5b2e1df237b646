"""Serve the app until a signal: the socket, slow clients, and a shutdown that lets running jobs finish.

    listener = bind("127.0.0.1", 8000)
    serve(engine, create_app(engine, limits=RequestLimits()), listener, ready=lambda: print("ready"))

Binding comes first, so that a port that is taken is an error before anything is started.
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
from contextlib import contextmanager
from typing import TYPE_CHECKING

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from weft.core.errors import CommError, InputError
from weft.serve.api_error import error_of_status
from weft.serve.messages import EngineEvent, JobEnded, RanksLost

if TYPE_CHECKING:
    from weft.serve.engine import Engine

HEAD_SECONDS = 10.0
"""Time limit for the head of a request, from the connection or the previous response."""
MAX_IDLE_CONNECTIONS = 256
"""Connections without a request; one more closes the oldest, or a flood of them would take every descriptor.
Twice the backlog, so that a head that came with its connection is read before."""
SEND_TIMEOUT_MS = 60_000
"""A client that reads nothing of a response for so long is disconnected."""
GRACE_SECONDS = 20.0
"""For running jobs, after a signal; less than the 30 s of orchestrators."""
CLOSE_SECONDS = 3
"""For connections, once no job runs."""
POLL_SECONDS = 0.1
_log = logging.getLogger("weft.serve")


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; port 0 is a free one."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # Listen at once: until then another process could still take the port.
        listener = socket.create_server(address, family=family, dualstack_ipv6=family == socket.AF_INET6)
    except OSError as error:
        raise InputError(
            f"The server cannot listen at {host}:{port}: {error.strerror or error}.",
            hint="Pass a --host of this machine and a --port that is free; 0 finds one.",
        ) from error
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # connections inherit it
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SEND_TIMEOUT_MS)
    return listener


def address(listener: socket.socket) -> str:
    """Return the URL for a browser; of all interfaces, that of loopback."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, str(host))
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class BoundedH11Protocol(H11Protocol):
    """Close idle connections, which uvicorn keeps until the head of a request, and answer others in JSON."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._idle: dict[BoundedH11Protocol, None] = self.server_state.__dict__.setdefault("idle", {})
        self._wait_for_head()

    @property
    def _is_idle(self) -> bool:
        """Whether no request is being answered; the rest of a rejected body does not count as one."""
        return self.cycle is None or self.cycle.response_complete

    def handle_events(self) -> None:
        super().handle_events()
        if not self._is_idle:
            self._idle.pop(self, None)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._idle.pop(self, None)

    def _wait_for_head(self) -> None:
        self._stop_waiting()
        self._timer = self.loop.call_later(HEAD_SECONDS, self._close_if_idle)
        if self._is_idle:
            self._idle[self] = None
        if len(self._idle) > MAX_IDLE_CONNECTIONS:
            oldest = next((each for each in self._idle if not each._has_input()), None)
            if oldest is not None:
                del self._idle[oldest]
                oldest._close_if_idle()

    def _has_input(self) -> bool:
        """Return whether bytes have arrived that were not read yet.

        Connections of a flood are accepted by the hundred before any is read: one with a request is not idle.
        """
        poll = select.poll()
        poll.register(self.transport.get_extra_info("socket").fileno(), select.POLLIN)
        return bool(poll.poll(0))

    def _close_if_idle(self) -> None:
        if self._is_idle and not self.transport.is_closing():
            self.transport.close()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 - the error envelope replaces it
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # else a response has begun
            body = json.dumps(error_of_status(400, "The request is not valid HTTP/1.1.").body()).encode()
            head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
            self.transport.write(f"HTTP/1.1 400 Bad Request\r\n{head}\r\n\r\n".encode() + body)
        self.transport.close()


def server_config(app: FastAPI, *, host: str, port: int) -> uvicorn.Config:
    """Return uvicorn's configuration: without its own log and headers, and no proxy is trusted."""
    return uvicorn.Config(
        app, host=host, port=port, log_config=None, access_log=False, server_header=False,
        proxy_headers=False, timeout_keep_alive=10, timeout_graceful_shutdown=CLOSE_SECONDS, backlog=128,
        http=BoundedH11Protocol, ws="none", lifespan="off",
    )  # fmt: skip


class _Server(uvicorn.Server):
    """Leave signals to `serve`: the first drains, where uvicorn would close waiting connections."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def serve(
    engine: Engine,
    app: FastAPI,
    listener: socket.socket,
    *,
    ready: Callable[[], None],
    grace: float = GRACE_SECONDS,
) -> None:
    """Serve until a signal; then running jobs have `grace` seconds to finish, and others stay queued."""
    host, port = listener.getsockname()[:2]
    server = _Server(server_config(app, host=host, port=port))
    asyncio.run(_serve(engine, server, listener, ready, grace))


async def _serve(
    engine: Engine, server: _Server, listener: socket.socket, ready: Callable[[], None], grace: float
) -> None:
    signaled = _catch_signals(grace)
    engine.start()
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    starting, stopping = asyncio.ensure_future(_started(engine)), asyncio.ensure_future(signaled.wait())
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
        server.handle_exit(signal.SIGTERM, None)  # as if by a signal: streams of events wait for this
        await asyncio.wait({serving})
        await asyncio.to_thread(engine.close)
    serving.result()


def _catch_signals(grace: float) -> asyncio.Event:
    """Return an event that the first signal sets; a second exits at once: jobs are on the disk."""
    signaled = asyncio.Event()

    def stop(number: signal.Signals) -> None:
        if signaled.is_set():
            os._exit(128 + number)
        signaled.set()
        _log.info("draining", extra={"signal": number.name, "grace_seconds": grace})

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    return signaled


async def _started(engine: Engine) -> None:
    """Wait until the ranks are ready; raise if they fail to load the model."""
    while (state := engine.status()) != "ok":
        if state == "failed":
            raise CommError(f"The ranks failed to start. {engine.trouble}".strip())
        await asyncio.sleep(POLL_SECONDS)


def log_events(engine: Engine, *, prompts: bool) -> None:
    """Log each job that ends and each loss of ranks; prompts are logged only if `prompts` is set."""

    def on_event(event: EngineEvent) -> None:
        if isinstance(event, RanksLost):
            _log.warning("ranks are started again", extra={"reason": event.reason})
        elif isinstance(event, JobEnded) and (job := event.job) is not None:
            about = {"job": job.id, "status": job.status, "timings": job.timings, "bytes": job.size}
            about |= {"prompt": job.params.prompt} if prompts else {}
            about |= {"code": job.failure.code, "why": job.failure.message} if job.failure else {}
            _log.info("job ended", extra=about)

    engine.on_event.append(on_event)
