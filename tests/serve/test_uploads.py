"""Bodies that are too much, and pictures that are none."""

from __future__ import annotations

import asyncio
import base64
import io
import socket
import struct
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest
from PIL import Image

from tests.serve.fake import Fake, serving
from weft.serve.api.input_image import decode_image
from weft.serve.api.limits import RequestLimits, bounded
from weft.serve.api_error import APIError
from weft.serve.disk import Disk

LIMITS = RequestLimits(body=200_000, body_seconds=1.0, picture=100_000, pixels=1_000_000, decode_seconds=20)


@pytest.fixture(scope="module")
def url(engine: Fake) -> Iterator[str]:
    with serving(engine, limits=LIMITS) as url:
        yield url


def picture(format: str = "png", size: tuple[int, int] = (20, 10), **more: Any) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, "red").save(out, format, **more)
    return out.getvalue()


def chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(width: int, height: int, rows: bytes, *, before: bytes = b"") -> bytes:
    """A grey PNG by hand: what it says of its size need not be true."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + before + body


TEXT = zlib.compress(b"x" * 30_000_000, 9)


def decoded(data: bytes, limits: RequestLimits) -> bytes:
    """The PNG that is made of a picture; no file and no byte is left of either."""
    with TemporaryDirectory() as folder:
        disk = Disk(Path(folder), quota=10**9)
        with disk.spool() as source, disk.spool() as picture:
            source.write(data)
            asyncio.run(decode_image(source, picture, limits))
            assert disk.used() == len(data) + picture.path.stat().st_size
            made = picture.read()
        assert disk.used() == 0
        assert [path.name for path in Path(folder).iterdir()] == ["states"]
        return made


def refusal(data: bytes, limits: RequestLimits = LIMITS) -> APIError:
    with pytest.raises(APIError) as refused:
        decoded(data, limits)
    return refused.value


@pytest.mark.parametrize("format", ["png", "jpeg", "webp"])
def test_a_picture_becomes_a_png_of_its_pixels(format: str) -> None:
    made = Image.open(io.BytesIO(decoded(picture(format), LIMITS)))
    assert (made.format, made.size, made.mode) == ("PNG", (20, 10), "RGB")
    red, green, _ = made.getpixel((3, 3))  # type: ignore[misc]
    assert red > 240 > 20 > green


def test_what_is_not_pixels_does_not_pass() -> None:
    from PIL.PngImagePlugin import PngInfo

    notes = PngInfo()
    notes.add_text("comment", "where it was taken")
    exif = Image.Exif()
    exif[0x0112] = 6  # it lies on its side
    for data, size in ((picture(pnginfo=notes), (20, 10)), (picture("jpeg", exif=exif), (10, 20))):
        made = decoded(data, LIMITS)
        assert Image.open(io.BytesIO(made)).size == size
        assert b"where" not in made
        assert b"exif" not in made.lower()


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "first bytes"), (b"GIF89a" + b"\0" * 20, "first bytes"), (b"BM" + b"\0" * 60, "first bytes"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "first bytes"), (b"PK\x03\x04" + b"\0" * 60, "first"),
        (b"II*\0" + b"\0" * 60, "first bytes"), (b"%PDF-1.7", "first bytes"), (b"RIFF\0\0\0\0AVI ", "first"),
        (b"\x89PNG\r\n\x1a\n", "not decode"), (b"\x89PNG\r\n\x1a\n" + picture("jpeg"), "not decode"),
        (picture()[:-30], "not decode"), (b"\xff\xd8\xff\xe0", "not decode"),
        (b"RIFF\x10\0\0\0WEBPVP8 \0\0\0\0", "not decode"),
        (png(1001, 1000, b""), "pixels"), (png(2**31 - 1, 2**31 - 1, b""), "pixels"),
        (picture(size=(2000, 600)), "pixels"), (picture("webp", size=(16000, 100)), "pixels"),
        (png(100, 100, b"\0" * 10), "not decode"),
        (png(9, 9, b"\0" * 90, before=chunk(b"zTXt", b"a\0\0" + TEXT)), "not decode"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused(data: bytes, says: str) -> None:
    refused = refusal(data)
    assert (refused.status, refused.code, refused.param) == (400, "invalid_image", "input_reference")
    assert says in refused.message
    assert "PNG, JPEG or WebP" in refused.message


def test_the_kernel_bounds_what_the_decoder_takes() -> None:
    large = png(5000, 5000, b"\0" * 5000 * 5001)
    assert len(large) < 30_000
    enough = replace(LIMITS, pixels=10**8)
    assert decoded(large, enough)
    assert "not decode" in refusal(large, replace(enough, decode_memory=2**27)).message
    begun = time.monotonic()
    assert "too long" in refusal(large, replace(enough, decode_seconds=0.01)).message
    assert time.monotonic() - begun < 10


def test_a_picture_in_json_and_in_a_form_is_the_same(url: str, engine: Fake) -> None:
    data = picture("jpeg")
    inline = {"image_url": "data:image/jpeg;base64," + base64.b64encode(data).decode()}
    one = httpx.post(f"{url}/v1/videos", timeout=60, json={"prompt": "a", "input_reference": inline})
    files = {"prompt": (None, "a"), "input_reference": ("../../x.jpg", data, "image/jpeg")}
    two = httpx.post(f"{url}/v1/videos", timeout=60, files=files)
    stored = [(engine.disk.of(answer.json()["id"]) / "reference.png").read_bytes() for answer in (one, two)]
    assert stored[0] == stored[1]
    assert stored[0].startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"prompt": (None, "a"), "mask": ("a.png", picture())}, "unknown_field"),
        ({"prompt": (None, "a"), "input_reference": (None, "text")}, "invalid_input_reference"),
        ({"prompt": ("a.txt", b"a")}, "unknown_field"),
        ({"prompt": (None, "a"), "input_reference": ("a.png", b"")}, "invalid_image"),
        ([("prompt", (None, "a")), ("prompt", (None, "b"))], "invalid_form"),
        ([("prompt", (None, "a")), *[("input_reference", ("a.png", picture()))] * 2], None),
        ([("prompt", (None, "a")), *[(f"f{i}", (None, "b")) for i in range(50)]], None),
    ],
)  # fmt: skip
def test_forms_that_are_wrong(url: str, fields: Any, code: str | None) -> None:
    answer = httpx.post(f"{url}/v1/videos", timeout=60, files=fields)
    assert answer.status_code == 400, answer.text
    assert code is None or answer.json()["error"]["code"] == code


@pytest.mark.parametrize(
    "url_given", ["data:image/png;base64,@@@", "data:image/gif;base64,AAAA", "data:image/png,x"]
)
def test_data_urls_that_are_wrong(url: str, url_given: str) -> None:
    body = {"prompt": "a", "input_reference": {"image_url": url_given}}
    answer = httpx.post(f"{url}/v1/videos", timeout=60, json=body)
    assert (answer.status_code, answer.json()["error"]["param"].partition(".")[0]) == (400, "input_reference")


def test_many_values_are_refused_before_each_is_an_error(url: str) -> None:
    body = {f"{n:x}": 1 for n in range(15_000)}
    answer = httpx.post(f"{url}/v1/videos", timeout=60, json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
    assert "commas" in answer.json()["error"]["message"]
    prompt = {"prompt": "a" + "," * 3999, "negative_prompt": "," * 4000, "num_inference_steps": 1}
    assert httpx.post(f"{url}/v1/videos", timeout=60, json=prompt).status_code == 200


def raw(url: str, *parts: bytes, pause: float = 0) -> bytes:
    """What comes back for bytes on a socket; the end of what is sent is not the end of the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as line:
        for part in parts:
            try:
                line.sendall(part)
            except OSError:
                break
            time.sleep(pause)
        answer = b""
        while more := line.recv(65536):
            answer += more
        return answer


HEAD = b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"


def test_a_body_that_says_it_is_too_large_is_not_read(url: str) -> None:
    answer = raw(url, HEAD + b"Content-Length: 200001\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"input_too_large"' in answer


@pytest.mark.parametrize("declared", [True, False])
def test_asynchronous_client_is_told_that_its_body_is_too_large(url: str, declared: bool) -> None:
    """Its transport drops what it has received when the server closes before all is sent."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(200):
            yield b"x" * 100_000

    async def post() -> httpx.Response:
        body = b"x" * 20_000_000 if declared else chunks()
        async with httpx.AsyncClient(timeout=60, headers={"content-type": "application/json"}) as http:
            return await http.post(f"{url}/v1/videos", content=body)

    answer = asyncio.run(post())
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "input_too_large")


def test_a_client_that_expects_100_continue_sends_no_body_that_is_too_large(url: str) -> None:
    answer = raw(url, HEAD + b"Content-Length: 200001\r\nExpect: 100-continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_say_so_is_counted(url: str) -> None:
    def chunks() -> Iterator[bytes]:
        for _ in range(100):
            yield b"x" * 10_000

    piece = b"2710\r\n" + b"x" * 10_000 + b"\r\n"
    answer = raw(url, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[piece] * 21)
    assert answer.startswith(b"HTTP/1.1 413")
    form = b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: multipart/form-data; boundary=x\r\n"
    begin = b'--x\r\nContent-Disposition: form-data; name="input_reference"; filename="a"\r\n\r\n'
    begin = f"{len(begin):x}\r\n".encode() + begin + b"\r\n"
    answer = raw(url, form + b"Transfer-Encoding: chunked\r\n\r\n", begin, *[piece] * 21)
    assert answer.startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_come_ends_the_wait(url: str) -> None:
    answer = raw(url, HEAD + b"Content-Length: 1000\r\n\r\n", b"{")
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"body_timeout"' in answer
    assert b"connection: close" in answer.lower()
    drops = [b"1\r\n{\r\n"] * 10
    answer = raw(url, HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *drops, pause=0.2)
    assert answer.startswith(b"HTTP/1.1 408")


def test_who_hangs_up_in_the_middle_of_a_body_leaves_nothing(url: str, engine: Fake, tmp_path: Path) -> None:
    before = len(engine.store.active())
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as line:
        line.sendall(HEAD + b'Content-Length: 100\r\n\r\n{"prompt":')
    assert httpx.get(f"{url}/live", timeout=60).status_code == 200
    assert len(engine.store.active()) <= before


def test_a_body_that_came_while_the_server_was_busy_is_read() -> None:
    limits, sent = replace(LIMITS, body_seconds=0.05), [b"a", b"b"]

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": sent.pop(0), "more_body": bool(sent)}

    async def read() -> None:
        receive_bounded = bounded(receive, limits)
        time.sleep(0.1)  # noqa: ASYNC251 - the whole process is busy
        assert (await receive_bounded())["body"] == b"a"
        assert (await receive_bounded())["body"] == b"b"

    asyncio.run(read())
    assert not sent
