"""Hostile requests, by hand: a table of each kind, with the statuses that are right."""

from __future__ import annotations

import base64
import io
import json
import socket
import struct
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import httpx

from weft.serve.api.limits import RequestLimits

LIMITS = RequestLimits(body=300_000, body_seconds=2, picture=150_000, pixels=1_000_000, decode_seconds=20)
QUICK = {"prompt": "a cat", "num_inference_steps": 2}
VIDEOS, IMAGES = "/v1/videos", "/v1/images/generations"


class Case(NamedTuple):
    name: str
    statuses: tuple[int, ...]
    send: Callable[[httpx.Client, str], httpx.Response]


def case(name: str, status: int | tuple[int, ...], method: str, path: str, **how: Any) -> Case:
    """One request; {video} in its path is a video that is there."""
    statuses = (status,) if isinstance(status, int) else status
    return Case(
        name, statuses, lambda http, video: http.request(method, path.replace("{video}", video), **how)
    )


def wrong_types() -> Iterator[Case]:
    """Each field with what it is not."""
    number, text, truth = ("7", [], {}, True), (7, [], {}, True), ("true", 1, [], {})
    sampling = dict.fromkeys(("seed", "num_inference_steps", "priority"), (*number, 1.5))
    sampling |= dict.fromkeys(("guidance_scale", "deadline_seconds"), number)
    sampling |= dict.fromkeys(("model", "negative_prompt", "size", "user"), text) | {"prompt": (*text, None)}
    video = {
        "seconds": ([], {}, True, "x"),
        "num_frames": (*number, 1.5),
        "fps": number,
        "input_reference": ("x", 7, [], {}),
    }
    image = {"n": (*number, 1.5), "stream": truth, "partial_images": number}
    image |= dict.fromkeys(("response_format", "output_format", "quality", "background"), (*text, "other"))
    for path, fields in ((VIDEOS, sampling | video), (IMAGES, sampling | image)):
        for field, values in fields.items():
            for value in values:
                yield case(f"{path} {field}={value!r}", 400, "POST", path, json=QUICK | {field: value})


TRAVERSALS = (
    "../../../../etc/passwd",
    "/etc/passwd",
    "..%2f..%2fetc%2fpasswd",
    "..\\..\\windows\\win.ini",
    "file:///etc/passwd",
    "....//....//etc/passwd",
    "a/../../etc/passwd",
    "%00/etc/passwd",
    "~/.ssh/id_rsa",
    "\\\\host\\share",
)


def traversals() -> Iterator[Case]:
    """A path where a string is expected."""
    for given in TRAVERSALS:
        said = repr(given)
        for field, status in (
            ("prompt", 200),
            ("negative_prompt", 200),
            ("user", 200),
            ("model", 404),
            ("size", 400),
            ("seconds", 400),
        ):
            yield case(f"{field} {said}", status, "POST", VIDEOS, json=QUICK | {field: given})
        body = QUICK | {"input_reference": {"image_url": given}}
        yield case(f"image_url {said}", 400, "POST", VIDEOS, json=body)
        yield case(f"id {said}", (404, 405), "GET", f"{VIDEOS}/{given}")
        yield case(f"content {said}", 404, "GET", f"{VIDEOS}/{given}/content")
        yield case(f"delete {said}", (404, 405), "DELETE", f"/v1/images/{given}")
        yield case(f"page {said}", 404, "GET", f"/page/{given}")
        yield case(f"variant {said}", 400, "GET", VIDEOS + "/{video}/content", params={"variant": given})
        yield case(f"after {said}", 400, "GET", VIDEOS, params={"after": given})
        yield case(f"key {said}", 200, "POST", VIDEOS, json=QUICK, headers={"idempotency-key": given})
        yield case(f"field {said}", 400, "POST", VIDEOS, json=QUICK | {given: 1})
    for given in TRAVERSALS[:4]:
        files = {"prompt": (None, "a"), "input_reference": (given, PICTURE)}
        yield case(f"file name {given!r}", 200, "POST", VIDEOS, files=files)


WORDS = (
    "'; DROP TABLE jobs; --",
    "' OR '1'='1",
    '"; DELETE FROM jobs WHERE 1=1; --',
    "a' UNION SELECT * FROM keys --",
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    '"><svg onload=alert(1)>',
    "javascript:alert(1)",
    "{{7*7}}",
    "${jndi:ldap://x/a}",
    "$(touch /tmp/x)",
    "`id`",
    "| cat /etc/hosts",
    "%s%s%n",
    "\u202eevil",
    "a\u0000b",
    "🦊" * 1000,
    "a" * 4000,
    "\r\nSet-Cookie: a=b",
    "\x1b[31m",
    "__import__('os')",
    "!!python/object:os.system",
)


def words() -> Iterator[Case]:
    """A prompt is a prompt, whatever it means elsewhere; it comes back as it was."""

    def echoed(text: str) -> Callable[[httpx.Client, str], httpx.Response]:
        def send(http: httpx.Client, _: str) -> httpx.Response:
            id = http.post(VIDEOS, json=QUICK | {"prompt": text}).json()["id"]
            answer = http.get(f"{VIDEOS}/{id}")
            assert answer.json()["prompt"] == text
            assert answer.headers["content-type"] == "application/json"
            assert "set-cookie" not in answer.headers
            return answer

        return send

    for text in WORDS:
        yield Case(f"prompt {text[:30]!r}", (200,), echoed(text))


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes, extra: bytes = b"") -> bytes:
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")


PICTURE = png(4, 4, b"\0" * 20)


def zipped() -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a.png", b"\0" * 20_000_000)
    return out.getvalue()


def bombs() -> Iterator[Case]:
    """Little that becomes much, and what only looks like a picture."""
    text = zlib.compress(b"x" * 50_000_000, 9)
    pictures = {
        "a billion pixels": png(31_623, 31_623, b""),
        "the largest PNG": png(2**31 - 1, 2**31 - 1, b""),
        "one pixel too many": png(1_000_001, 1, b"\0" * 1_000_002),
        "50 MB of text": png(4, 4, b"\0" * 20, chunk(b"zTXt", b"a\0\0" + text)),
        "50 MB of profile": png(4, 4, b"\0" * 20, chunk(b"iCCP", b"a\0\0" + text)),
        "more data than pixels": png(4, 4, b"\0" * 50_000_000),
        "no data": png(900, 900, b""),
        "a zip": zipped(),
        "a zip behind a PNG": b"\x89PNG\r\n\x1a\n" + zipped(),
        "gzip": zlib.compress(b"\0" * 10_000_000),
        "svg": b"<svg><image href='file:///etc/passwd'/></svg>",
        "xml": b"<!DOCTYPE a [<!ENTITY b SYSTEM 'file:///etc/passwd'>]><a>&b;</a>",
        "postscript": b"%!PS (x) run",
        "empty": b"",
        "zeros": b"\0" * 1000,
        "a PNG of nothing": b"\x89PNG\r\n\x1a\n",
        "a JPEG of nothing": b"\xff\xd8\xff\xd9",
        "half a PNG": PICTURE[:40],
        "a WebP of nothing": b"RIFF\xff\xff\xff\xffWEBPVP8L",
    }
    for name, data in pictures.items():
        status = (200, 400) if name in ("more data than pixels", "50 MB of profile") else 400
        yield case(
            f"file: {name}",
            status,
            "POST",
            VIDEOS,
            files={"prompt": (None, "a"), "input_reference": ("a.png", data)},
        )
    for name in ("a billion pixels", "a zip", "empty", "50 MB of text"):
        url = "data:image/png;base64," + base64.b64encode(pictures[name]).decode()
        yield case(
            f"data url: {name}", 400, "POST", VIDEOS, json=QUICK | {"input_reference": {"image_url": url}}
        )
    for url in (
        "http://169.254.169.254/latest",
        "https://127.0.0.1/",
        "ftp://x/y",
        "data:text/html;base64,AA==",
        "data:image/png;base64,",
    ):
        yield case(f"url: {url}", 400, "POST", VIDEOS, json=QUICK | {"input_reference": {"image_url": url}})


def sizes() -> Iterator[Case]:
    """Too much of everything."""
    headers = {"content-type": "application/json"}
    for path in (VIDEOS, IMAGES, f"{VIDEOS}/sync"):
        yield case(f"{path} long prompt", 400, "POST", path, json={"prompt": "a" * 4001})
        yield case(f"{path} long negative", 400, "POST", path, json=QUICK | {"negative_prompt": "a" * 4001})
        yield case(f"{path} large body", 413, "POST", path, json={"prompt": "a" * 300_001})
        yield case(f"{path} deep lists", 400, "POST", path, content=b"[" * 100_000, headers=headers)
        yield case(f"{path} deep objects", 400, "POST", path, content=b'{"a":' * 50_000, headers=headers)
        yield case(f"{path} 2000 fields", 400, "POST", path, json={f"f{i}": i for i in range(2000)})
        yield case(
            f"{path} long number",
            400,
            "POST",
            path,
            content=b'{"prompt":"a","seed":' + b"9" * 9999 + b"}",
            headers=headers,
        )
        yield case(
            f"{path} infinity",
            400,
            "POST",
            path,
            content=b'{"prompt":"a","guidance_scale":1e999}',
            headers=headers,
        )
        yield case(f"{path} not utf-8", 400, "POST", path, content=b'{"prompt":"\xc3\x28"}', headers=headers)
        yield case(f"{path} half a pair", 400, "POST", path, content=b'{"prompt":"\\udc00"}', headers=headers)
        yield case(
            f"{path} gzip",
            400,
            "POST",
            path,
            content=zlib.compress(b"{}"),
            headers=headers | {"content-encoding": "gzip"},
        )
        yield case(
            f"{path} pickle",
            415,
            "POST",
            path,
            content=b"\x80\x04.",
            headers={"content-type": "application/x-pickle"},
        )
        yield case(f"{path} size", 400, "POST", path, json=QUICK | {"size": "80000x80000"})
        yield case(f"{path} steps", 400, "POST", path, json=QUICK | {"num_inference_steps": 10**9})
    yield case("frames", 400, "POST", VIDEOS, json=QUICK | {"num_frames": 99_998})
    yield case("frames by seconds", 400, "POST", VIDEOS, json=QUICK | {"seconds": "9999"})
    yield case("n", 400, "POST", IMAGES, json=QUICK | {"n": 10**6})
    yield case("limit", 400, "GET", VIDEOS, params={"limit": 10**9})
    yield case("long query", 431, "GET", f"{VIDEOS}?x=" + "a" * 33_000)
    yield case("long address", 404, "GET", f"{VIDEOS}/" + "a" * 30_000)
    yield case("longer address", 431, "GET", f"{VIDEOS}/" + "a" * 33_000)
    yield case("long key", 400, "POST", VIDEOS, json=QUICK, headers={"idempotency-key": "k" * 256})
    yield case("many parts", 400, "POST", VIDEOS, files=[("prompt", (None, "a"))] * 500)
    yield case(
        "part without a name",
        400,
        "POST",
        VIDEOS,
        content=b"--x\r\n\r\na\r\n--x--\r\n",
        headers={"content-type": "multipart/form-data; boundary=x"},
    )


RANGES = {
    "bytes=0-0": 206,
    "bytes=-1": 206,
    "bytes=0-": 206,
    "bytes=0-99999999999": 206,
    "bytes=1-2,4-5": 206,
    "bytes=5-2": (400, 416),
    "bytes=-": 400,
    "bytes=": 400,
    "bytes=a-b": 400,
    "bytes=99999999-": 416,
    "bytes=0-1-2": 400,
    "bytes": 200,
    "items=0-5": 200,
    "0-5": 200,
    "bytes=-0": (400, 416),
    "bytes=1e3-": 400,
    "bytes=--5": (400, 416),
    "bytes=" + ",".join(f"{i}-{i}" for i in range(0, 200, 2)): 206,
    "bytes=" + "0-1," * 1500: 200,
    "bytes=18446744073709551616-": 416,
    "bytes=٣-٤": (206, 400, 416),
    "bytes=0-0\u00a0": (206, 400),
}


def ranges() -> Iterator[Case]:
    for given, status in RANGES.items():
        headers = {"range": given.encode("utf-8")}
        yield case(f"range {given[:30]!r}", status, "GET", VIDEOS + "/{video}/content", headers=headers)


def raw(statuses: int | tuple[int, ...], name: str, *parts: bytes, end: str = "") -> Case:
    """Bytes on a socket; status 0 is a connection that is closed without a word."""

    def send(http: httpx.Client, video: str) -> httpx.Response:
        at = (http.base_url.host, http.base_url.port or 80)
        with socket.create_connection(at, timeout=30) as line:
            for part in parts:
                line.sendall(part.replace(b"{video}", video.encode()))
                time.sleep(0.02)
            if end == "reset":
                line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if end in ("reset", "close"):
                return httpx.Response(0)
            if end == "half":
                line.shutdown(socket.SHUT_WR)
            answer = b""
            try:
                while more := line.recv(65536):
                    answer += more
            except (TimeoutError, ConnectionResetError):
                pass
        head, _, body = answer.partition(b"\r\n\r\n")
        lines = head.decode("latin-1").split("\r\n")
        fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
        status = int(lines[0].split()[1]) if answer else 0
        if fields.pop("transfer-encoding", "") == "chunked":
            body = b"".join(body.split(b"\r\n")[1::2])
        return httpx.Response(
            status, headers=fields, content=body[: int(fields.get("content-length", len(body)))]
        )

    return Case(name, (statuses,) if isinstance(statuses, int) else statuses, send)


def sockets() -> Iterator[Case]:
    """What is no request, half a request, or two in one."""
    get = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    post = get.replace(b"GET /live", b"POST /v1/videos") + b"Content-Type: application/json\r\n"
    body = b'{"prompt":"a"}'
    yield raw(400, "not http", b"hello\r\n\r\n")
    yield raw(400, "tls", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50 + b"\r\n\r\n")
    yield raw(403, "http/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    yield raw((0, 400), "http/0.9", b"GET /\r\n\r\n")
    yield raw(400, "zeros", b"\0" * 100 + b"\r\n\r\n")
    yield raw(400, "header without a colon", get + b"nonsense\r\n\r\n")
    yield raw(400, "space in a header's name", get + b"X Y: 1\r\n\r\n")
    yield raw(400, "no host", b"GET /live HTTP/1.1\r\n\r\n")
    yield raw(400, "two hosts", get + b"Host: evil.example\r\n\r\n")
    yield raw(
        (400, 403), "other host", b"GET /live HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n"
    )
    yield raw(
        (200, 403, 404),
        "absolute address",
        b"GET http://evil.example/live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    )
    yield raw(431, "huge header", get + b"X: " + b"a" * 100_000 + b"\r\n\r\n")
    yield raw(431, "many headers", get + b"X: a\r\n" * 20_000 + b"\r\n")
    yield raw(400, "two lengths", post + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n{}")
    yield raw(400, "negative length", post + b"Content-Length: -1\r\n\r\n")
    yield raw(400, "length in words", post + b"Content-Length: ten\r\n\r\n")
    yield raw((400, 413), "endless length", post + b"Content-Length: " + b"9" * 40 + b"\r\n\r\n")
    yield raw((400, 501), "unknown coding", post + b"Transfer-Encoding: evil\r\n\r\n")
    yield raw(400, "chunk that is no number", post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n" + body)
    yield raw(
        (400, 413, 408),
        "chunk of 2^64",
        post + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffff\r\n" + body,
    )
    yield raw(400, "length too small", post + b"Content-Length: 5\r\n\r\n" + body)
    yield raw(408, "length too large", post + b"Content-Length: 50\r\n\r\n" + body)
    yield raw(408, "no body", post + b"Content-Length: 50\r\n\r\n")
    yield raw(408, "slow body", post + b"Content-Length: 999\r\n\r\n", *[b"{"] * 10)
    yield raw(413, "large length", post + b"Content-Length: 999999999\r\n\r\n")
    yield raw(200, "folded header", get + b"X-A: b\r\n c\r\n\r\n")
    yield raw((200, 400), "line feed in a header", get + b"Idempotency-Key: a\nSet-Cookie: b\r\n\r\n")
    yield raw(400, "zero byte in a header", get + b"X: a\0b\r\n\r\n")
    yield raw((200, 400), "return in a header", get + b"X: a\rSet-Cookie: b\r\n\r\n")
    yield raw(
        404,
        "line feed in an address",
        b"GET /v1/videos/a%0d%0aSet-Cookie:%20b HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    )
    yield raw(
        (400, 404),
        "bad escape",
        b"GET /v1/videos/%ff%zz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    )
    yield raw(
        (400, 404),
        "bytes in an address",
        b"GET /v1/videos/\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    )
    yield raw(
        404,
        "dots in an address",
        b"GET /page/../../../../etc/passwd HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n",
    )
    yield raw(405, "connect", b"CONNECT /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
    yield raw(
        405, "a method of their own", b"EVIL /live HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n"
    )
    yield raw(
        (200, 400, 405),
        "websocket",
        get + b"Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n",
    )
    yield raw((200, 100), "continue", post + b"Expect: 100-continue\r\nContent-Length: 14\r\n\r\n" + body)
    yield raw(0, "half a head", get[:30], end="close")
    yield raw(0, "half a head, half closed", get[:30], end="half")
    yield raw(0, "half a body", post + b"Content-Length: 999\r\n\r\n{", end="close")
    yield raw((0, 400, 408), "half a body, half closed", post + b"Content-Length: 999\r\n\r\n{", end="half")
    yield raw(0, "reset in a body", post + b"Content-Length: 999\r\n\r\n{", end="reset")
    yield raw(0, "nothing", end="close")
    yield raw(0, "nothing, reset", end="reset")
    yield raw(0, "gone before the answer", get + b"\r\n", end="reset")
    yield raw(
        0,
        "gone from a download",
        b"GET /v1/videos/{video}/content HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        end="reset",
    )
    yield raw(
        0,
        "gone from events",
        b"GET /v1/videos/{video}/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
        end="reset",
    )
    yield raw(200, "two at once", get.replace(b"Connection: close\r\n", b"") + b"\r\n" + get + b"\r\n")


def headers() -> Iterator[Case]:
    """Headers that would be something else's."""
    for name, value in {
        "x-request-id": "mine",
        "x-forwarded-for": "1.2.3.4",
        "x-forwarded-host": "evil.example",
        "x-original-url": "/metrics",
        "x-http-method-override": "DELETE",
        "cookie": "a=b;" * 500,
        "accept": "text/html",
        "if-none-match": '"' * 999,
        "if-range": "x",
        "if-modified-since": "never",
        "accept-encoding": "evil",
        "referer": "javascript:1",
    }.items():
        yield case(f"header {name}", 200, "GET", VIDEOS + "/{video}/content", headers={name: value})
    for value in ("application/json; charset=utf-7", "APPLICATION/JSON"):
        yield case(
            f"type {value}", 200, "POST", VIDEOS, content=json.dumps(QUICK), headers={"content-type": value}
        )
    for value in (
        "",
        "text/html",
        "application/json\t+x",
        "multipart/form-data; boundary=" + "a" * 500,
        "application/xml",
        "text/plain",
    ):
        yield case(
            f"type {value[:40]!r}", (400, 415), "POST", VIDEOS, content=b"{}", headers={"content-type": value}
        )


CASES = [
    each
    for kind in (wrong_types, traversals, words, bombs, sizes, ranges, sockets, headers)
    for each in kind()
]
