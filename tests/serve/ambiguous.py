"""Requests that two readers could read differently, or that ask for what there is not: all are refused."""

from __future__ import annotations

from collections.abc import Iterator

from tests.serve.hostile import IMAGES, PICTURE, QUICK, VIDEOS, Case, case, raw

DIGITS = ("\u0663", "\u0967", "\uff13", "\u00b2", "\U0001d7db")
"""Three, or two, of other scripts; Python takes most of them for digits."""
NUMBERS = (
    "1_0",
    " 1",
    "1 ",
    "+1",
    "0x10",
    "1e",
    "\u00a01",
    "NaN",
    "Infinity",
    "-Infinity",
    "",
    "one",
    *DIGITS,
)
FIELDS = (
    "num_frames",
    "num_inference_steps",
    "seed",
    "priority",
    "guidance_scale",
    "fps",
    "deadline_seconds",
)


def numbers() -> Iterator[Case]:
    """What is a number only for some."""
    for text in NUMBERS:
        for field in FIELDS:
            files = {"prompt": (None, "a"), field: (None, text)}
            yield case(f"form {field}={text!r}", 400, "POST", VIDEOS, files=files)
        for path, name in (
            ("/v1/plan", "frames"),
            ("/v1/plan", "steps"),
            (VIDEOS, "limit"),
            ("/v1/images", "limit"),
        ):
            yield case(f"{path} {name}={text!r}", 400, "GET", path, params={name: text})
    for text in ("0", "0.0", "0.000", "00", "-1", "1_0", "1.", ".5", "1e1", " 1", "99999", *DIGITS):
        yield case(f"seconds {text!r}", 400, "POST", VIDEOS, json=QUICK | {"seconds": text})
    for value in (0, 0.0, -1, -0.0, 10_000):
        yield case(f"seconds {value!r}", 400, "POST", VIDEOS, json=QUICK | {"seconds": value})
    for digit in DIGITS:
        for size in (f"{digit}2x32", f"32x{digit}2", f"{digit}x{digit}", f"32{digit}x32"):
            yield case(f"size {size!r}", 400, "POST", VIDEOS, json=QUICK | {"size": size})
    for size in (
        "0x8",
        "8x0",
        "08x8",
        "8X8",
        "8x8x8",
        "8*8",
        "8x8\n",
        " 8x8",
        "8x",
        "x8",
        "-8x8",
        "8.0x8",
        "\u0038\u00d78",
    ):
        yield case(f"size {size!r}", 400, "POST", VIDEOS, json=QUICK | {"size": size})
        yield case(f"image size {size!r}", 400, "POST", IMAGES, json=QUICK | {"size": size})
        yield case(f"plan size {size!r}", 400, "GET", "/v1/plan", params={"size": size})


def queries() -> Iterator[Case]:
    """Parameters that there are not, or twice."""
    paths = (
        VIDEOS,
        "/v1/images",
        "/v1/plan",
        "/v1/models",
        "/v1/status",
        VIDEOS + "/{video}",
        VIDEOS + "/{video}/content",
    )
    for path in paths:
        for name in ("x", "Limit", "__proto__", "size[]", "\u202e", "a" * 2000):
            yield case(f"{path} ?{name[:20]!r}", 400, "GET", path, params={name: "1"})
    for path, query in (
        (VIDEOS, "limit=1&limit=2"), (VIDEOS, "order=asc&order=desc"), ("/v1/plan", "steps=1&steps=1"),
        ("/v1/plan", "size=8x8&size=16x16"), (VIDEOS + "/{video}/content", "variant=video&variant=thumbnail"),
    ):  # fmt: skip
        yield case(f"{path}?{query}", 400, "GET", f"{path}?{query}")
    yield case("query of a POST", 400, "POST", f"{VIDEOS}?prompt=b", json=QUICK)
    yield case("query of a DELETE", 400, "DELETE", VIDEOS + "/{video}?force=1")


def methods() -> Iterator[Case]:
    for path in (
        VIDEOS,
        "/v1/images",
        IMAGES,
        "/v1/plan",
        "/v1/models",
        "/v1/status",
        "/health",
        "/live",
        "/metrics",
        "/",
    ):
        for method in ("PUT", "PATCH", "OPTIONS", "TRACE"):
            yield case(f"{method} {path}", 405, method, path)


NAMED = b'Content-Disposition: form-data; name="prompt"'
FORMS = {
    "no boundary": ("", b"--x\r\n\r\na\r\n--x--\r\n"),
    "an empty boundary": ("; boundary=", b"--\r\n\r\na\r\n----\r\n"),
    "another boundary": ("; boundary=y", b"--x\r\n" + NAMED + b"\r\n\r\nb\r\n--x--\r\n"),
    "no end": ("; boundary=x", b"--x\r\n" + NAMED + b"\r\n\r\na"),
    "no head": ("; boundary=x", b"--x\r\nprompt\r\n--x--\r\n"),
    "no line ends": ("; boundary=x", b"--x\n" + NAMED + b"\n\na\n--x--\n"),
    "a bare field": ("; boundary=x", b"prompt=a"),
    "JSON": ("; boundary=x", b'{"prompt":"a"}'),
    "nothing": ("; boundary=x", b""),
    "zeros": ("; boundary=x", b"\0" * 5000),
    "a charset that raises": (
        "; charset=undefined; boundary=x",
        b"--x\r\n" + NAMED + b"\r\n\r\na\r\n--x--\r\n",
    ),
    "a charset that is slow": (
        "; charset=punycode; boundary=x",
        b"--x\r\n" + NAMED + b"\r\n\r\na\r\n--x--\r\n",
    ),
    "a bad charset": ("; charset=evil; boundary=x", b"--x--\r\n"),
    "a long boundary": ("; boundary=" + "y" * 3000, b"--" + b"y" * 3000 + b"--\r\n"),
    "a part in a part": (
        "; boundary=x",
        b"--x\r\nContent-Type: multipart/mixed; boundary=z\r\n\r\n--z--\r\n--x--\r\n",
    ),
}


def forms() -> Iterator[Case]:
    for name, (rest, body) in FORMS.items():
        sort = "multipart/form-data" + rest
        yield case(f"form with {name}", 400, "POST", VIDEOS, content=body, headers={"content-type": sort})
    file = ("input_reference", ("a.png", PICTURE))
    url = ("input_reference[image_url]", (None, "data:image/png;base64,AAAA"))
    for name, parts in {
        "two files": [file, file],
        "a file and a URL": [file, url],
        "a URL and a file": [url, file],
    }.items():
        yield case(f"form with {name}", 400, "POST", VIDEOS, files=[("prompt", (None, "a")), *parts])
    for field in ("Prompt", "prompt[]", "input_reference[file]", "__proto__", "a" * 500):
        yield case(
            f"form field {field[:20]!r}",
            400,
            "POST",
            VIDEOS,
            files={"prompt": (None, "a"), field: (None, "b")},
        )


def repeated() -> Iterator[Case]:
    """Keys that stand twice."""
    headers = {"content-type": "application/json"}
    for body in (
        b'{"prompt":"a","prompt":"b"}',
        b'{"prompt":"a","seed":1,"s\\u0065ed":2}',
        b'{"prompt":"a","input_reference":{"image_url":"data:image/png;base64,AAAA","image_url":'
        b'"data:image/png;base64,BBBB"}}',
    ):
        yield case(f"twice {body[:30]!r}", 400, "POST", VIDEOS, content=body, headers=headers)
    body = b'{"prompt":"a","prompt":"b"}'
    yield case("twice of an image", 400, "POST", IMAGES, content=body, headers=headers)


def smuggled() -> Iterator[Case]:
    """Bodies with two ends, and headers with two values."""
    head = b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    body, chunked = b'{"prompt":"a"}', b'e\r\n{"prompt":"a"}\r\n0\r\n\r\n'
    hidden = b"GET /live HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
    for name, lengths in {
        "length, then chunks": b"Content-Length: 14\r\nTransfer-Encoding: chunked\r\n",
        "chunks, then length": b"Transfer-Encoding: chunked\r\nContent-Length: 14\r\n",
        "a length of 0 and chunks": b"Content-Length: 0\r\nTransfer-Encoding: chunked\r\n",
        "chunks in capitals": b"Content-Length: 14\r\nTRANSFER-ENCODING: Chunked\r\n",
        "chunks of chunks": b"Content-Length: 14\r\nTransfer-Encoding: chunked, chunked\r\n",
    }.items():
        yield raw(400, name, head + lengths + b"\r\n" + chunked + hidden)
    for name in (b"Authorization", b"Content-Type", b"Idempotency-Key", b"Origin"):
        twice = name + b": application/json\r\n" + name + b": other\r\n"
        close = b"Connection: close\r\nContent-Length: 14\r\n"
        yield raw((400, 403), f"two of {name.decode()}", head + twice + close + b"\r\n" + body)


CASES = [each for kind in (numbers, queries, methods, forms, repeated, smuggled) for each in kind()]
