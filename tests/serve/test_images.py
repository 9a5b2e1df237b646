"""/v1/images: generated while the client waits, streamed, cancelled with it."""

from __future__ import annotations

import base64
import io
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.serve.fake import Fake
from weft.serve.jobs import Job

QUICK = {"prompt": "a fox", "num_inference_steps": 4, "seed": 5}
LONG = {"prompt": "a fox", "num_inference_steps": 900}
MAGIC = {"png": b"\x89PNG", "jpeg": b"\xff\xd8\xff", "webp": b"RIFF"}


@pytest.fixture
def slow(engine: Fake) -> Iterator[None]:
    engine.pace = 0.05
    yield
    for job in engine.store.active():
        engine.cancel(job.id)
    engine.pace = 0


def generate(http: httpx.Client, **more: Any) -> httpx.Response:
    return http.post("/v1/images/generations", json=QUICK | more)


def newest(engine: Fake, count: int) -> list[Job]:
    return list(engine.store.page("image", limit=count)[0])


def all_cancelled(engine: Fake, count: int) -> bool:
    until = time.monotonic() + 60
    while any(job.active for job in newest(engine, count)) and time.monotonic() < until:
        time.sleep(0.02)
    return all(job.failure is not None and job.failure.code == "cancelled" for job in newest(engine, count))


@pytest.mark.parametrize("format", [*MAGIC])
def test_images_are_of_the_format_that_was_asked_for(http: httpx.Client, format: str) -> None:
    made = generate(http, output_format=format, size="24x16").json()
    data = base64.b64decode(made["data"][0]["b64_json"])
    assert data.startswith(MAGIC[format])
    assert (made["output_format"], made["size"], made["data"][0]["url"]) == (format, "24x16", None)


def test_seeds_follow_each_other(http: httpx.Client) -> None:
    three = generate(http, n=3).json()
    assert [one["seed"] for one in three["weft"]] == [5, 6, 7]
    assert len({one["id"] for one in three["weft"]}) == 3
    last = generate(http, seed=7).json()
    assert last["data"][0]["b64_json"] == three["data"][2]["b64_json"] != three["data"][0]["b64_json"]


def test_an_image_is_listed_fetched_and_deleted(http: httpx.Client) -> None:
    from PIL import Image

    made = generate(http, response_format="url").json()
    [id], [data] = [one["id"] for one in made["weft"]], made["data"]
    assert data["b64_json"] is None
    assert Image.open(io.BytesIO(httpx.get(data["url"], timeout=60).content)).size == (64, 64)
    thumbnail = http.get(f"/v1/images/{id}/content", params={"variant": "thumbnail"})
    assert thumbnail.headers["content-type"] == "image/webp"
    listed = http.get("/v1/images", params={"limit": 1}).json()["data"][0]
    assert (listed["id"], listed["object"], listed["status"]) == (id, "image", "completed")
    assert http.delete(f"/v1/images/{id}").json()["object"] == "image.deleted"
    assert http.get(f"/v1/images/{id}/content").status_code == 404


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"n": 0}, "invalid_n"), ({"n": 9}, "invalid_n"), ({"stream": "yes"}, "invalid_stream"),
        ({"partial_images": 4}, "invalid_partial_images"),
        ({"response_format": "file"}, "invalid_response_format"),
        ({"output_format": "gif"}, "invalid_output_format"), ({"size": "1x1"}, "invalid_size"),
        ({"num_frames": 2}, "unknown_field"), ({"quality": "hd"}, "invalid_quality"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(http: httpx.Client, asked: dict[str, Any], code: str) -> None:
    answer = generate(http, **asked)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_what_other_clients_always_send_is_taken(http: httpx.Client) -> None:
    sent = {
        "size": "auto",
        "quality": "auto",
        "background": "auto",
        "user": "someone",
        "n": None,
        "model": "shapes",
    }
    assert generate(http, **sent).status_code == 200


def test_two_images_are_streamed_together(http: httpx.Client, slow: None) -> None:
    answer = generate(http, n=2, stream=True, partial_images=1)
    ids = answer.headers["x-job-id"].split(",")
    blocks = [
        dict(line.split(": ", 1) for line in block.splitlines())
        for block in answer.text.strip().split("\n\n")
    ]
    told = [(block["event"].partition(".")[2], json.loads(block["data"])) for block in blocks]
    assert sorted((name, data["weft"]["id"]) for name, data in told) == sorted(
        (name, id) for name in ("partial_image", "completed") for id in ids
    )
    assert all(data["type"] == f"image_generation.{name}" for name, data in told)


def test_who_goes_away_cancels_the_images(http: httpx.Client, engine: Fake, slow: None) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/images/generations", json=LONG | {"n": 3}, timeout=0.5)
    assert all_cancelled(engine, 3)


def test_who_leaves_a_stream_cancels_the_image(http: httpx.Client, engine: Fake, slow: None) -> None:
    with http.stream("POST", "/v1/images/generations", json=LONG | {"stream": True}) as answer:
        assert answer.status_code == 200
    assert all_cancelled(engine, 1)


def test_who_has_a_key_may_come_back(http: httpx.Client, engine: Fake, slow: None) -> None:
    def send(timeout: float) -> httpx.Response:
        body = QUICK | {"num_inference_steps": 30, "n": 2}
        return http.post(
            "/v1/images/generations", json=body, timeout=timeout, headers={"idempotency-key": "mine"}
        )

    with pytest.raises(httpx.ReadTimeout):
        send(0.5)
    begun = {job.id for job in newest(engine, 2)}
    engine.pace = 0
    assert {one["id"] for one in send(60).json()["weft"]} == begun


def test_all_images_or_none(http: httpx.Client, engine: Fake, slow: None) -> None:
    engine.limit = 2
    try:
        answer = http.post("/v1/images/generations", json=LONG | {"n": 3})
    finally:
        engine.limit = 64
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert answer.headers["retry-after"] == "3"
    assert all_cancelled(engine, 2)


def test_an_image_that_fails_is_an_error(http: httpx.Client) -> None:
    answer = generate(http, prompt="fail", num_inference_steps=9)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")


def test_an_image_that_another_deletes_is_an_error(http: httpx.Client, engine: Fake, slow: None) -> None:
    before = newest(engine, 1)[0].id
    with ThreadPoolExecutor(1) as elsewhere:
        waits = elsewhere.submit(http.post, "/v1/images/generations", json=LONG)
        while (id := newest(engine, 1)[0].id) == before:
            time.sleep(0.01)
        assert engine.cancel_and_delete(id)
        answer = waits.result()
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "cancelled")


@pytest.mark.parametrize("path", ["edits", "variations"])
def test_what_there_is_not_says_so(http: httpx.Client, path: str) -> None:
    answer = http.post(f"/v1/images/{path}", json=QUICK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
