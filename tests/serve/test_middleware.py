"""What the server does with requests before a route has them: budgets, methods, queries, headers."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest
from uvicorn.server import ServerState

from tests.serve.fake import Fake, made, serving
from tests.serve.hosting import until
from weft.serve.api.app import create_app
from weft.serve.api.limits import RequestLimits
from weft.serve.api.server import BoundedH11Protocol, server_config


def open_streams(http: httpx.Client, id: str, count: int, stack: ExitStack) -> list[int]:
    """The statuses of so many streams, which stay open as long as the stack."""
    url = f"/v1/videos/{id}/events"
    return [stack.enter_context(http.stream("GET", url)).status_code for _ in range(count)]


def test_streams_leave_room_for_requests_and_probes(tmp_path: Any) -> None:
    limits = RequestLimits(requests=2, streams=3)
    pool = httpx.Limits(max_connections=None)
    with made(tmp_path, pace=0.05) as engine, serving(engine, limits=limits) as url, ExitStack() as stack:
        http = stack.enter_context(httpx.Client(base_url=url, timeout=60, limits=pool))
        id = http.post("/v1/videos", json={"prompt": "a", "num_inference_steps": 900}).json()["id"]
        streams = stack.enter_context(ExitStack())
        assert open_streams(http, id, 4, streams) == [200, 200, 200, 503]
        busy = http.post("/v1/images/generations", json={"prompt": "a", "stream": True})
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "busy")
        assert int(busy.headers["retry-after"]) > 0
        assert len(engine.store.active()) == 1, "what is refused is not queued"
        for path in ("/health", "/live", "/v1/videos", "/v1/status"):
            assert http.get(path).status_code == 200
        streams.close()
        until(lambda: open_streams(http, id, 1, streams) == [200])  # the server sees that they are closed
        streams.close()


def test_so_many_requests_at_a_time(tmp_path: Any) -> None:
    body = {"prompt": "a", "num_inference_steps": 900}
    with made(tmp_path, pace=0.05) as engine, serving(engine, limits=RequestLimits(requests=1)) as url:
        with ThreadPoolExecutor(1) as pool:
            waits = pool.submit(httpx.post, f"{url}/v1/videos/sync", json=body, timeout=60)
            until(lambda: engine.store.active())
            busy = httpx.get(f"{url}/v1/videos", timeout=60)
            for path in ("/live", "/health"):
                assert httpx.get(f"{url}{path}", timeout=60).status_code == 200
            engine.cancel(engine.store.active()[0].id)
            assert waits.result().status_code == 409
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "busy")
        assert busy.headers["retry-after"]


def test_five_hundred_and_twenty_streams_of_one_job_take_nothing_from_others(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def first(self: Fake, id: str) -> AsyncIterator[Any]:
        """The job once, and then no news: the fake looks for them all the time."""
        yield self.store.get(id)
        await asyncio.Event().wait()

    monkeypatch.setattr(Fake, "changes", first)
    with made(tmp_path, pace=0.5) as engine, serving(engine) as url, ExitStack() as stack:
        pool = httpx.Limits(max_connections=None)
        http = stack.enter_context(httpx.Client(base_url=url, timeout=120, limits=pool))
        id = http.post("/v1/videos", json={"prompt": "a", "num_inference_steps": 900}).json()["id"]
        statuses = open_streams(http, id, 520, stack)
        assert (statuses.count(200), statuses.count(503)) == (256, 264)
        for path in ("/health", "/live", "/v1/videos", "/v1/models", f"/v1/videos/{id}"):
            assert http.get(path).status_code == 200
        assert http.post("/v1/videos", json={"prompt": "b"}).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("PUT", "/v1/videos", "GET, POST"), ("PATCH", "/v1/videos/x", "DELETE, GET"),
        ("POST", "/v1/videos/x/content", "GET, HEAD"),
        ("PUT", "/v1/videos/edits", "DELETE, GET, POST"), ("POST", "/health", "GET"),
        ("POST", "/", "GET, HEAD"),
        ("DELETE", "/v1/models/a/b", "GET"), ("POST", "/page/app.js", "GET, HEAD"),
        ("EVIL", "/openapi.json", "GET"),
    ],
)  # fmt: skip
def test_a_method_that_is_not_for_a_path_is_told_all_that_are(
    http: httpx.Client, method: str, path: str, allow: str
) -> None:
    answer = http.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allow)
    assert answer.json()["error"]["message"] == f"Method {method} is not allowed here. Use {allow}."


@pytest.mark.parametrize(
    ("path", "code", "says"),
    [
        ("/v1/plan?sise=64x64", "unknown_parameter", "Did you mean 'size'?"),
        ("/v1/plan?num_frames=4", "unknown_parameter", "'num_frames'"),
        ("/v1/videos?limt=4", "unknown_parameter", "Did you mean 'limit'?"),
        ("/v1/videos?limit=4&limit=5", "repeated_parameter", "limit is repeated"),
        ("/v1/images?after=&x=1", "unknown_parameter", "'x'"),
        ("/v1/models?a=b", "unknown_parameter", "Known: none"),
        ("/v1/status?a=", "unknown_parameter", "'a'"),
        ("/v1/plan?frames=٣", "invalid_frames", "a number is written as"),
        ("/v1/plan?frames=1_0", "invalid_frames", "a number is written as"),
        ("/v1/videos?limit=%2010", "invalid_limit", "a number is written as"),
        ("/v1/plan?size=٣٢x٣٢", "invalid_size", "pattern"),
    ],
)  # fmt: skip
def test_queries_that_are_wrong(http: httpx.Client, path: str, code: str, says: str) -> None:
    answer = http.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
    assert says in answer.json()["error"]["message"]


@pytest.mark.parametrize("seconds", ["0", "0.0", "0.000", "00", "٣", "1_0", " 1", "-1", "", "10000", 0, 0.0])
def test_seconds_that_are_none(http: httpx.Client, seconds: Any) -> None:
    for form in (False, True):
        body = {"prompt": "a", "seconds": seconds}
        fields: Any = {"files": {k: (None, str(v)) for k, v in body.items()}} if form else {"json": body}
        answer = http.post("/v1/videos", **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "seconds")


@pytest.mark.parametrize("seconds", ["1", "0.5", "0.25", "0.125", "2.0", "1.999", 0.5, 2])
def test_seconds_that_are_some(http: httpx.Client, seconds: Any) -> None:
    answer = http.post("/v1/videos", json={"prompt": "a", "seconds": seconds, "num_inference_steps": 1})
    assert answer.status_code == 200


KEY = "k" * 32
GOOD, BAD = ("authorization", f"Bearer {KEY}"), ("authorization", "Bearer wrong")


@pytest.mark.parametrize("headers", [[GOOD, BAD], [BAD, GOOD], [GOOD, GOOD]])
def test_two_keys_are_none(tmp_path: Any, headers: list[tuple[str, str]]) -> None:
    with made(tmp_path) as engine, serving(engine, key=KEY) as url:
        assert httpx.get(f"{url}/v1/videos", headers=[GOOD]).status_code == 200
        refused = httpx.get(f"{url}/v1/videos", headers=headers)
        assert refused.status_code in (400, 401)
        assert refused.json()["error"]["code"] in ("repeated_header", "invalid_api_key")


def test_connections_that_were_answered_before_their_body_are_bounded(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In number and in time: a byte of the body now and then is no request."""
    monkeypatch.setattr("weft.serve.api.server.MAX_IDLE_CONNECTIONS", 2)
    head = b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 999\r\n\r\n"
    with made(tmp_path) as engine, serving(engine) as url, ExitStack() as stack:
        place = ("127.0.0.1", int(url.rpartition(":")[2]))

        def refused() -> socket.socket:
            line = stack.enter_context(socket.create_connection(place, timeout=8))
            line.sendall(head)
            assert line.recv(65536).startswith(b"HTTP/1.1 404")
            line.sendall(b"x")
            return line

        def wait_until_closed(line: socket.socket) -> None:
            with suppress(ConnectionResetError):  # the byte may have come after the end
                while line.recv(65536):  # the rest of the answer; raises TimeoutError if it stays open
                    pass

        wait_until_closed([refused() for _ in range(3)][0])
        monkeypatch.setattr("weft.serve.api.server.HEAD_SECONDS", 0.1)
        wait_until_closed(refused())


def test_flood_does_not_close_a_connection_whose_request_was_not_read_yet(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.serve.api.server.MAX_IDLE_CONNECTIONS", 2)

    async def ask(engine: Fake, stack: ExitStack) -> bytes:
        config, state = (
            server_config(create_app(engine, limits=RequestLimits()), host="127.0.0.1", port=0),
            ServerState(),
        )
        config.load()
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            lambda: BoundedH11Protocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
        )
        place = server.sockets[0].getsockname()
        # The loop does not run meanwhile, so all of these are accepted before any of them is read.
        lines = [stack.enter_context(socket.create_connection(place, timeout=60)) for _ in range(6)]
        lines[0].sendall(b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        try:
            return await loop.run_in_executor(None, lines[0].recv, 65536)
        finally:
            server.close()
            for each in list(state.connections):
                each.transport.abort()
            await asyncio.sleep(0)  # so that the sockets are closed

    with made(tmp_path) as engine, ExitStack() as stack:
        assert asyncio.run(ask(engine, stack)).startswith(b"HTTP/1.1 200")


def test_a_server_without_descriptors_is_busy_and_goes_on(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def out(*_: Any, **__: Any) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    body = {"prompt": "a" * 200_000}  # too large for memory
    with made(tmp_path) as engine, serving(engine) as url:
        with monkeypatch.context() as patch:
            patch.setattr("weft.serve.disk.tempfile.mkstemp", out)
            busy = httpx.post(f"{url}/v1/videos", json=body)
        assert (busy.status_code, busy.json()["error"]["code"]) == (503, "busy")
        assert httpx.post(f"{url}/v1/videos", json=body).status_code == 400
    assert not [record for record in caplog.records if record.exc_info]
