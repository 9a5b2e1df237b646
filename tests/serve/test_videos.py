"""/v1/videos: created, watched, downloaded, listed, deleted."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.fake import Fake, media
from weft.serve.jobs import GenerationParams, Job

QUICK = {"prompt": "a cat", "num_inference_steps": 3, "seed": 5}


@pytest.fixture
def slow(engine: Fake) -> Iterator[None]:
    engine.pace = 0.05
    yield
    engine.pace = 0


def ended(engine: Fake, id: str) -> Job:
    until = time.monotonic() + 60
    while (job := engine.store.get(id)) is not None and job.active:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert job is not None
    return job


def create(http: httpx.Client, **more: Any) -> dict[str, Any]:
    answer = http.post("/v1/videos", json=QUICK | more)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(scope="module")
def video(http: httpx.Client, engine: Fake) -> str:
    id = create(http)["id"]
    assert ended(engine, id).status == "completed"
    return id


def events(text: str) -> list[tuple[str, Any]]:
    fields = [
        dict(line.split(": ", 1) for line in block.splitlines()) for block in text.strip().split("\n\n")
    ]
    return [(field["event"], json.loads(field["data"])) for field in fields]


def test_what_is_left_out_is_the_models_own(http: httpx.Client) -> None:
    answer = http.post("/v1/videos", json={"prompt": "a cat"})
    video = answer.json()
    assert (video["status"], video["progress"], video["model"], video["size"]) == (
        "queued",
        0,
        "shapes",
        "64x64",
    )
    assert (video["seconds"], video["weft"]["num_frames"], video["weft"]["num_steps"]) == ("2", 16, 20)
    assert answer.headers["openai-poll-after-ms"] == "500"
    assert video["weft"]["seed"] != http.post("/v1/videos", json={"prompt": "a cat"}).json()["weft"]["seed"]


@pytest.mark.parametrize(
    ("asked", "seconds", "frames", "size"),
    [
        ({"seconds": "1"}, "1", 8, "64x64"),
        ({"seconds": 1.1}, "1", 8, "64x64"),
        ({"seconds": "0.01"}, "0.25", 2, "64x64"),
        ({"seconds": "2", "fps": 12}, "2", 24, "64x64"),
        ({"num_frames": 6, "fps": 3.0}, "2", 6, "64x64"),
        ({"size": "16x88"}, "2", 16, "16x88"),
        ({"seed": None, "negative_prompt": None, "input_reference": None}, "2", 16, "64x64"),
    ],
)
def test_sizes_and_times_are_what_was_asked(
    http: httpx.Client, asked: dict[str, Any], seconds: str, frames: int, size: str
) -> None:
    video = create(http, **asked)
    assert (video["seconds"], video["weft"]["num_frames"], video["size"]) == (seconds, frames, size)


@pytest.mark.parametrize(
    ("asked", "status", "code", "param", "says"),
    [
        ({"size": "70x64"}, 400, "invalid_size", "size", "Nearest: 72x64."),
        ({"size": "64x1"}, 400, "invalid_size", "size", "Nearest: 64x8."),
        ({"size": "64"}, 400, "invalid_size", "size", "size 64 is invalid"),
        ({"size": "99999x99999"}, 400, "invalid_size", "size", "Nearest: 100000x100000."),
        ({"size": "8000x8000"}, 400, "out_of_memory", "size", "fewer frames"),
        ({"num_frames": 7}, 400, "invalid_num_frames", "num_frames", "Nearest: 8."),
        ({"num_frames": 8, "seconds": "1"}, 400, "unsupported_combination", "num_frames", "Set one"),
        ({"prompt": ""}, 400, "invalid_prompt", "prompt", "at least 1"),
        ({"prompt": " \n"}, 400, "invalid_prompt", "prompt", "invalid"),
        ({"prompt": "x" * 4001}, 400, "invalid_prompt", "prompt", "4000"),
        ({"sed": 1}, 400, "unknown_field", "sed", "Did you mean 'seed'?"),
        ({"output_path": "/etc/passwd"}, 400, "unknown_field", "output_path", "Unknown field"),
        ({"seed": "5"}, 400, "invalid_seed", "seed", "integer"),
        ({"seed": -1}, 400, "invalid_seed", "seed", "seed -1"),
        ({"seed": 2**63}, 400, "invalid_seed", "seed", "less than"),
        ({"seed": True}, 400, "invalid_seed", "seed", "integer"),
        ({"guidance_scale": 1e9}, 400, "invalid_guidance_scale", "guidance_scale", "100"),
        ({"priority": 11}, 400, "invalid_priority", "priority", "10"),
        ({"deadline_seconds": 0}, 400, "invalid_deadline_seconds", "deadline_seconds", "greater than 0"),
        ({"model": "sora-2"}, 404, "model_not_found", "model", "This server has 'shapes'"),
        ({"input_reference": {"image_url": "https://example.com/a.png"}}, 400, "invalid_input_reference",
         "input_reference.image_url", "data:image"),
    ],
)  # fmt: skip
def test_what_the_model_cannot_make_is_refused_with_what_it_can(
    http: httpx.Client, asked: dict[str, Any], status: int, code: str, param: str, says: str
) -> None:
    answer = http.post("/v1/videos", json=QUICK | asked)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)
    assert says in error["message"]


def test_a_prompt_is_required(http: httpx.Client) -> None:
    error = http.post("/v1/videos", json={"seed": 1}).json()["error"]
    assert (error["code"], error["param"], error["type"]) == (
        "missing_prompt",
        "prompt",
        "invalid_request_error",
    )


def test_what_a_pipeline_does_not_take_is_refused(http: httpx.Client, engine: Fake) -> None:
    assert engine.facts is not None
    facts = engine.facts
    try:
        engine.facts = replace(facts, takes=("prompt",))
        for field, value in (("negative_prompt", "blur"), ("guidance_scale", 2.0)):
            error = http.post("/v1/videos", json=QUICK | {field: value}).json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_combination", field)
    finally:
        engine.facts = facts


def test_who_needs_an_image_says_so(
    http: httpx.Client, engine: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engine.facts is not None
    monkeypatch.setattr(engine, "facts", replace(engine.facts, needs_image=True))
    answer = http.post("/v1/videos", json=QUICK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "image_required")
    assert answer.json()["error"]["param"] == "input_reference"
    assert http.get("/v1/plan").status_code == 200


def test_progress_grows_and_is_100_only_at_the_end(http: httpx.Client, engine: Fake, slow: None) -> None:
    id, seen = create(http, num_inference_steps=6)["id"], []
    while (now := http.get(f"/v1/videos/{id}").json())["status"] != "completed":
        seen.append((now["progress"], now["weft"]["step"]))
        assert now["progress"] < 100
    assert seen == sorted(seen)
    assert now["progress"] == 100
    assert {"queue", "encode", "denoise", "decode"} <= {
        k for k, v in now["weft"]["timings"].items() if v is not None
    }


def test_events_end_with_the_video(http: httpx.Client, slow: None) -> None:
    id = create(http, num_inference_steps=4)["id"]
    answer = http.get(f"/v1/videos/{id}/events")
    assert answer.headers["content-type"].startswith("text/event-stream")
    told = events(answer.text)
    assert [name for name, _ in told][-1] == "done"
    assert told[-1][1]["status"] == "completed"
    previews = [data for name, data in told if name == "preview"]
    steps = [data["step"] for data in previews]
    assert len(set(steps)) == len(steps) >= 2
    assert all(data["b64_json"].startswith("iVBOR") for data in previews)


def test_events_of_a_deleted_video_end(http: httpx.Client, slow: None) -> None:
    id = create(http, num_inference_steps=500)["id"]
    with http.stream("GET", f"/v1/videos/{id}/events") as answer:
        lines = answer.iter_lines()
        assert next(lines) == "event: progress"
        with httpx.Client(base_url=http.base_url, timeout=60) as other:
            assert other.delete(f"/v1/videos/{id}").json() == {
                "id": id,
                "object": "video.deleted",
                "deleted": True,
            }
        assert "event: done" in list(lines)


def test_content_before_the_end_is_not_to_be_asked_for_again(http: httpx.Client, slow: None) -> None:
    id = create(http, num_inference_steps=500)["id"]
    answer = http.get(f"/v1/videos/{id}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "video_not_ready")
    assert answer.headers["x-should-retry"] == "false"
    assert http.delete(f"/v1/videos/{id}").status_code == 200
    assert http.delete(f"/v1/videos/{id}").status_code == 404


def test_ranges_are_parts_of_the_whole(http: httpx.Client, video: str) -> None:
    address = f"/v1/videos/{video}/content"
    whole = http.get(address)
    assert whole.headers["content-type"] == "video/mp4"
    assert whole.headers["content-disposition"] == f'inline; filename="{video}.mp4"'
    for asked, part in (("5-9", slice(5, 10)), ("-7", slice(-7, None)), ("100-", slice(100, None))):
        answer = http.get(address, headers={"range": f"bytes={asked}"})
        assert (answer.status_code, answer.content) == (206, whole.content[part])
    beyond = http.get(address, headers={"range": "bytes=9999999-"})
    assert (beyond.status_code, beyond.json()["error"]["code"]) == (416, "range_not_satisfiable")
    assert beyond.headers["content-range"] == f"bytes */{len(whole.content)}"
    assert http.get(address, headers={"range": "lines=1-2"}).content == whole.content
    head = http.head(address)
    assert (head.status_code, head.content, int(head.headers["content-length"])) == (
        200,
        b"",
        len(whole.content),
    )


def test_what_has_not_changed_is_not_sent_again(http: httpx.Client, video: str) -> None:
    address = f"/v1/videos/{video}/content"
    tag = http.get(address).headers["etag"]
    assert http.get(address, headers={"if-none-match": f'"other", W/{tag}'}).status_code == 304
    assert http.get(address, headers={"if-none-match": '"other"'}).status_code == 200
    stale = http.get(address, headers={"range": "bytes=0-1", "if-range": '"other"'})
    assert stale.status_code == 200


def test_variants_are_pictures_of_it(http: httpx.Client, video: str) -> None:
    from PIL import Image

    sizes = {}
    for variant in ("thumbnail", "spritesheet"):
        answer = http.get(f"/v1/videos/{video}/content", params={"variant": variant})
        assert answer.headers["content-type"] == "image/webp"
        sizes[variant] = Image.open(io.BytesIO(answer.content)).size
    assert sizes == {"thumbnail": (64, 64), "spritesheet": (256, 256)}
    assert (
        http.get(f"/v1/videos/{video}/content", params={"variant": "x"}).json()["error"]["param"] == "variant"
    )


def test_a_picture_of_a_long_video_takes_little_memory(tmp_path: Path) -> None:
    """All of its frames would be 280 MB."""
    asked = GenerationParams(
        kind="video", model="shapes", prompt="", frames=240, height=512, width=768, steps=1, seed=0,
        format="mp4",
    )  # fmt: skip
    (tmp_path / "video.mp4").write_bytes(media(asked))
    code = (
        "import re, sys; from pathlib import Path; from PIL import Image; import av\n"
        "from weft.serve.api.variants import variant_of\n"
        "most = lambda: int(re.search(r'VmHWM:\\s*(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "before = most(); variant_of(Path(sys.argv[1]), 'thumbnail'); print(most() - before)"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "video.mp4")]
    said = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True)
    assert int(said.stdout) < 150_000  # KiB


def test_pages_go_on_behind_a_video_that_is_gone(http: httpx.Client) -> None:
    ids = [create(http)["id"] for _ in range(4)]
    page = http.get("/v1/videos", params={"limit": 2}).json()
    assert [video["id"] for video in page["data"]] == ids[:1:-1]
    assert (page["object"], page["first_id"], page["last_id"], page["has_more"]) == (
        "list",
        ids[3],
        ids[2],
        True,
    )
    http.delete(f"/v1/videos/{ids[2]}")
    page = http.get("/v1/videos", params={"limit": 1, "after": ids[2]}).json()
    assert page["first_id"] == ids[1]


@pytest.mark.parametrize(
    "bad", [{"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "../x"}, {"limit": "x"}]
)
def test_pages_that_there_are_not(http: httpx.Client, bad: dict[str, Any]) -> None:
    answer = http.get("/v1/videos", params=bad)
    [param] = bad
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_the_same_key_is_the_same_video(http: httpx.Client) -> None:
    def send(key: str, **more: Any) -> httpx.Response:
        return http.post("/v1/videos", json=QUICK | more, headers={"idempotency-key": key})

    first = send("one").json()["id"]
    assert send("one").json()["id"] == first
    form = http.post("/v1/videos", data=QUICK, files={}, headers={"idempotency-key": "one"})
    assert form.status_code == 415  # httpx sends no multipart without a file: a plain form is not read
    assert send("two").json()["id"] != first
    other = send("one", seed=6)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    assert other.headers["x-should-retry"] == "false"
    assert send("x" * 256).json()["error"]["code"] == "invalid_idempotency_key"


def test_a_form_says_the_same_as_json(http: httpx.Client) -> None:
    fields = {
        "prompt": (None, "a cat"),
        "seed": (None, "9"),
        "guidance_scale": (None, "1.5"),
        "seconds": (None, "1"),
    }
    video = http.post("/v1/videos", files=fields).json()
    assert (video["weft"]["seed"], video["weft"]["guidance_scale"], video["seconds"]) == (9, 1.5, "1")
    error = http.post("/v1/videos", files=fields | {"seed": (None, "x")}).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_seed", "seed")


def test_sync_is_the_video_itself(http: httpx.Client) -> None:
    answer = http.post("/v1/videos/sync", json=QUICK)
    assert answer.headers["content-type"] == "video/mp4"
    again = http.get(f"/v1/videos/{answer.headers['x-job-id']}/content")
    assert answer.content == again.content
    failed = http.post("/v1/videos/sync", json=QUICK | {"prompt": "fail", "num_inference_steps": 9})
    assert (failed.status_code, failed.json()["error"]["code"]) == (500, "internal_error")
    assert failed.headers["x-should-retry"] == "false"


def test_who_goes_away_from_sync_cancels_it(http: httpx.Client, engine: Fake, slow: None) -> None:
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/videos/sync", json=QUICK | {"num_inference_steps": 900}, timeout=0.5)
    newest = engine.store.page("video", limit=1)[0][0]
    failure = ended(engine, newest.id).failure
    assert failure is not None and failure.code == "cancelled"


@pytest.mark.parametrize("path", ["video_1/remix", "edits", "extensions", "characters"])
def test_what_there_is_not_says_so(http: httpx.Client, path: str) -> None:
    answer = http.post(f"/v1/videos/{path}", json={"prompt": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert "POST /v1/videos" in answer.json()["error"]["message"]


def test_an_image_is_no_video(http: httpx.Client) -> None:
    made = http.post("/v1/images/generations", json={"prompt": "a fox", "response_format": "url"}).json()
    assert http.get(f"/v1/videos/{made['weft'][0]['id']}").status_code == 404
    assert http.get(f"/v1/images/{made['weft'][0]['id']}").json()["object"] == "image"
