"""What all routes have in common, and those about the server itself."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from tests.serve.fake import Fake, serving
from tests.serve.hosting import until
from tests.serve.test_uploads import picture
from weft.serve.api import logs
from weft.serve.api.app import create_app
from weft.serve.api.job_routes import finished_job
from weft.serve.api.limits import RequestLimits
from weft.serve.api.openapi import openapi_schema
from weft.serve.api.schemas import job_response as made_of
from weft.serve.api_error import APIError
from weft.serve.jobs import GenerationParams, Job, JobFailure, new_id
from weft.serve.watch import LiveJob

ASKED = GenerationParams(
    kind="video", model="shapes", prompt="a", frames=2, height=8, width=8, steps=9, seed=0, format="mp4"
)
JOB = Job(id=new_id("video", 0), params=ASKED, created=0.0, deadline=1.0)


def test_every_answer_has_an_id_and_is_for_nobody_elses_page(http: httpx.Client) -> None:
    seen = set()
    for method, path in (
        ("GET", "/"),
        ("GET", "/live"),
        ("GET", "/v1/none"),
        ("PUT", "/v1/videos"),
        ("GET", "/page/x"),
    ):
        headers = http.request(method, path).headers
        seen.add(headers["x-request-id"])
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        rules = headers["content-security-policy"]
        assert "default-src 'self'" in rules
        assert "unsafe" not in rules
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers
    assert len(seen) == 5


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/videos/", 404, "not_found"),
        ("GET", "/redoc", 404, "not_found"),
        ("GET", "/page/../app.py", 404, "not_found"),
        ("GET", "/page/%2e%2e/app.py", 404, "not_found"),
        ("GET", "/page/none.js", 404, "not_found"),
        ("PUT", "/v1/videos", 405, "method_not_allowed"),
        ("TRACE", "/live", 405, "method_not_allowed"),
        ("POST", "/page/page.js", 405, "method_not_allowed"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/v1/plan?size=7x7", 400, "invalid_size"),
        ("GET", "/v1/plan?frames=0", 400, "invalid_frames"),
    ],
)
def test_every_error_is_in_the_envelope(
    http: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    answer = http.request(method, path)
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert status != 405 or answer.headers["allow"]


@pytest.mark.parametrize(
    ("body", "sort", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"", "application/json", 400, "invalid_json"),
        (b"[]", "application/json", 400, "invalid_json"),
        (b'{"prompt": "\xff"}', "application/json", 400, "invalid_json"),
        (b'{"prompt": "\\ud800"}', "application/json", 400, "invalid_json"),
        (b'{"prompt": NaN}', "application/json", 400, "invalid_prompt"),
        (b'{"prompt": "a", "guidance_scale": NaN}', "application/json", 400, "invalid_guidance_scale"),
        (b'{"prompt": "a", "seed": 1' + b"0" * 5000 + b"}", "application/json", 400, None),
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", "application/json", 400, None),
        (b'{"prompt": "a"}', "text/plain", 415, "unsupported_media_type"),
        (b'{"prompt": "a"}', "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b"--x", "multipart/form-data; boundary=x", 400, None),
        (b"x", "multipart/form-data", 400, None),
    ],
)
def test_bodies_that_say_nothing(
    http: httpx.Client, body: bytes, sort: str, status: int, code: str | None
) -> None:
    answer = http.post("/v1/videos", content=body, headers={"content-type": sort})
    assert answer.status_code == status, answer.text
    assert code is None or answer.json()["error"]["code"] == code


def test_a_fault_of_ours_says_only_where_to_look(engine: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("secret /etc/path")

    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JSONFormatter())
    monkeypatch.setattr(engine.store, "page", broken)
    logger = logging.getLogger("weft.serve")
    logger.addHandler(handler)
    try:
        with serving(engine) as url:
            answer = httpx.get(f"{url}/v1/videos", timeout=60)
    finally:
        logger.removeHandler(handler)
    error, id = answer.json()["error"], answer.headers["x-request-id"]
    assert (answer.status_code, error["code"], error["type"]) == (500, "internal_error", "server_error")
    assert id in error["message"]
    assert "secret" not in answer.text
    # Other servers of this process log here too, of a request before this one.
    line = next(line for line in map(json.loads, out.getvalue().splitlines()) if line["request_id"] == id)
    assert (line["route"], line["level"]) == ("/v1/videos", "error")
    assert "secret /etc/path" in line["traceback"]


def test_requests_are_logged_without_prompts(http: httpx.Client) -> None:
    out = io.StringIO()
    handler = logging.StreamHandler(out)
    handler.setFormatter(logs.JSONFormatter())
    logs.access.addHandler(handler)
    logs.access.setLevel(logging.INFO)
    try:
        answers = http.post("/v1/videos", json={"prompt": "my secret"}), http.get("/v1/videos/my%0asecret")
        ids = [answer.headers["x-request-id"] for answer in answers]
        # Written when the answer is already here; so that of the test before may come too.
        until(lambda: all(id in out.getvalue() for id in ids))
    finally:
        logs.access.removeHandler(handler)
    by_id = {line["request_id"]: line for line in map(json.loads, out.getvalue().splitlines())}
    lines = [by_id[id] for id in ids]
    assert [(line["method"], line["route"], line["status"]) for line in lines] == [
        ("POST", "/v1/videos", 200), ("GET", "/v1/videos/{id}", 404),
    ]  # fmt: skip
    assert "secret" not in out.getvalue()


def test_logs_in_a_terminal_are_text_and_polling_is_not_among_them(http: httpx.Client) -> None:
    """Other servers of this process may log a request before these."""

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    loggers = [logging.getLogger(name) for name in ("weft", "uvicorn")]
    before = [(each.handlers, each.propagate, each.level) for each in loggers]
    out, file = Terminal(), io.StringIO()
    try:
        logs.configure(stream=file)
        logging.getLogger("weft.serve").info("to a file", extra={"seconds": 0.5})
        lines = [json.loads(line) for line in file.getvalue().splitlines()]
        assert [line["seconds"] for line in lines if line["message"] == "to a file"] == [0.5]
        logs.configure(stream=out)
        for path in ("/health", "/v1/status", "/metrics", "/v1/models"):
            http.get(path)
        until(lambda: "/v1/models" in out.getvalue())
        extra = {"why": 'a "word"\x1b[2J', "timings": {"queue": 0.01234, "media": 2.0}}
        logging.getLogger("weft.serve").warning("careful", extra=extra)
    finally:
        for logger, (handlers, propagate, level) in zip(loggers, before, strict=True):
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)
    text = out.getvalue()
    assert re.search(r"^[\d:]{8} info    request  method=GET route=/v1/models .* request_id=\w+$", text, re.M)
    assert r'warning careful  why="a \"word\"\u001b[2J" timings=queue:0.0123,media:2' in text
    assert "route=/health" not in text


@pytest.mark.parametrize(("scale", "guided"), [(None, True), ("1", False), ("3.5", True)])
def test_plan_is_for_the_guidance_of_the_request(
    http: httpx.Client,
    engine: Fake,
    monkeypatch: pytest.MonkeyPatch,
    scale: str | None,
    guided: bool,  # noqa: FBT001
) -> None:
    planned: list[bool] = []
    monkeypatch.setattr(engine, "explain", lambda params: planned.append(params.shape.guided) or {})
    for frames in ("1", "16"):
        query = {"frames": frames} | ({"guidance_scale": scale} if scale else {})
        assert http.get("/v1/plan", params=query).status_code == 200
    assert planned == [guided, guided]
    assert http.get("/v1/plan", params={"guidance_scale": "101"}).status_code == 400


def test_health_is_readiness_and_live_is_not(http: httpx.Client, engine: Fake) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    for state in ("starting", "draining", "failed"):
        engine.state = state
        health = http.get("/health")
        assert (health.status_code, health.json()) == (503, {"status": state})
        assert http.get("/live").json() == {"status": "alive"}
    engine.trouble = "There is no such GPU."
    assert http.get("/health").json() == {"status": "failed", "reason": "There is no such GPU."}
    engine.state, engine.trouble = "ok", ""


def test_nothing_is_taken_while_the_server_is_not_ready(http: httpx.Client, engine: Fake) -> None:
    facts, engine.facts = engine.facts, None
    starting = http.post("/v1/videos", json={"prompt": "a cat"})
    assert http.get("/v1/models").json()["data"][0]["weft"] == {}
    engine.facts, engine.state = facts, "draining"
    draining = http.post("/v1/images/generations", json={"prompt": "a cat"})
    engine.state = "ok"
    assert (starting.status_code, starting.json()["error"]["code"]) == (503, "starting")
    assert (draining.status_code, draining.json()["error"]["code"]) == (503, "draining")
    assert int(starting.headers["retry-after"]) < int(draining.headers["retry-after"])
    assert starting.json()["error"]["type"] == "server_error"


def test_the_plan_and_the_status_are_the_engines(http: httpx.Client, engine: Fake) -> None:
    assert http.get("/v1/plan", params={"size": "64x64", "frames": 8}).json()["plan"] == "ring 4"
    assert http.get("/v1/plan", params={"frames": 1}).status_code == 200
    assert len(http.get("/v1/status").json()["ranks"]) == engine.world
    assert http.get("/v1/models").json()["data"][0]["weft"]["multiple"] == [2, 8, 8]


def test_a_model_of_images_has_a_plan_too(http: httpx.Client, engine: Fake) -> None:
    assert engine.facts is not None
    facts = engine.facts
    engine.facts = replace(facts, kinds=("image",), frames=1)
    assert http.get("/v1/plan").status_code == 200
    engine.facts = facts


@pytest.mark.parametrize(
    ("code", "status"),
    [("out_of_memory", 400), ("too_long", 400), ("disk_full", 503), ("rank_lost", 503), ("else", 500)],
)
def test_who_waits_is_told_whose_fault_it_was(code: str, status: int) -> None:
    with pytest.raises(APIError) as refused:
        finished_job(replace(JOB, status="failed", failure=JobFailure(code=code, message="It failed.")))
    assert refused.value.status == status


def test_a_job_that_ended_is_nowhere_any_more() -> None:
    live = LiveJob(queue_position=1, eta=2.0, ranks=(0,), preview=b"png", preview_step=3)
    assert made_of(replace(JOB, status="in_progress"), live).weft.eta_seconds == 2.0
    ended = made_of(replace(JOB, status="failed"), live).weft
    assert (ended.eta_seconds, ended.queue_position, ended.ranks) == (None, None, [])


def test_the_page_is_served(http: httpx.Client) -> None:
    page = http.get("/")
    assert page.headers["content-type"].startswith("text/html")
    assert "<script>" not in page.text
    assert http.head("/").status_code == 200
    assert http.get("/page/page.js").headers["content-type"].startswith("text/javascript")


def test_the_document_describes_every_route_with_its_errors(engine: Fake) -> None:
    said = httpx.Response(200, json=schema_of(engine, None)).json()
    assert "/v1/videos" in said["paths"]
    for path, item in said["paths"].items():
        for method, operation in item.items():
            assert {"403", "500"} <= set(operation["responses"]), (path, method)
            assert "422" not in operation["responses"]
            for status, response in operation["responses"].items():
                if int(status) >= 400 and path != "/health":
                    schema = response["content"]["application/json"]["schema"]
                    assert schema["$ref"].endswith("/ErrorResponse")
    references = {part.split('"')[0] for part in json.dumps(said).split("#/components/schemas/")[1:]}
    assert references <= set(said["components"]["schemas"])
    assert "securitySchemes" not in said["components"]
    assert schema_of(engine, "k" * 16)["paths"]["/v1/videos"]["get"]["security"]


def schema_of(engine: Fake, key: str | None) -> dict[str, Any]:
    return openapi_schema(create_app(engine, key=key, limits=RequestLimits()), key=key is not None)


def test_the_server_has_no_torch() -> None:
    code = "import sys; from weft.serve.api import app, server; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.fixture
def shapes(engine: Fake) -> Iterator[Fake]:
    """A model with few words, which begins with no picture."""
    assert engine.facts is not None
    before = engine.facts
    takes = tuple(name for name in before.takes if name != "image")
    engine.facts = replace(before, takes=takes, vocabulary=("red", "circle"), closed_vocabulary=True)
    yield engine
    engine.facts = before


def test_a_picture_for_a_model_that_takes_none_is_refused_however_it_comes(
    shapes: Fake, http: httpx.Client
) -> None:
    data, jobs = picture(), len(shapes.store.active())
    inline = {"image_url": "data:image/png;base64," + base64.b64encode(data).decode()}
    form = {"prompt": (None, "a red circle"), "input_reference": ("a.png", data, "image/png")}
    for answer in (
        http.post("/v1/videos", json={"prompt": "a red circle", "input_reference": inline}),
        http.post("/v1/videos", files=form),
        http.post("/v1/videos/sync", files=form),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "input_reference"), answer.text
        assert "takes no input_reference" in error["message"]
    assert http.post("/v1/videos", files={"prompt": (None, "a red circle")}).status_code == 200
    assert len(shapes.store.active()) <= jobs + 1


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/sync", "/v1/images/generations"])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a cat"}, "prompt"),
        ({"prompt": "a red circle", "negative_prompt": "a cat"}, "negative_prompt"),
        ({"prompt": "a red blue circle"}, "prompt"),
        ({"prompt": "cat " * 900}, "prompt"),
    ],
)
def test_words_that_the_model_does_not_know_are_refused_with_those_it_knows(
    shapes: Fake, http: httpx.Client, path: str, body: dict[str, Any], param: str
) -> None:
    answer = http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_prompt", param)
    assert len(error["message"]) < 600
    if "cat" in str(body):
        assert "does not know cat. It knows red, orange," in error["message"]
    assert http.get("/v1/models").json()["data"][0]["weft"]["vocabulary"] == ["red", "circle"]
    assert http.get("/v1/plan").status_code == 200
    assert shapes.state == "ok"
