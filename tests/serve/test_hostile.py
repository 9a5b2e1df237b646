"""Hostile requests: each gets the right status in the envelope, learns nothing, and the server goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve import ambiguous, hostile
from tests.serve.fake import Fake, made, serving
from tests.serve.full_disk import Injected
from tests.serve.hostile import LIMITS, QUICK, VIDEOS, Case
from tests.serve.hosting import until

LEAKS = (
    "Traceback",
    "site-packages",
    "weft/serve",
    ".py",
    "sqlite",
    "pytest",
    "/tmp",
    "/root",
    "root:x:0",
    "pydantic",
    "starlette",
)
CASES = [*hostile.CASES, *ambiguous.CASES]
FORBIDDEN = [each for each in CASES if all(400 <= status < 500 for status in each.statuses)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    with made(tmp_path_factory.mktemp("jobs"), limit=500, largest=2**18) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Fake) -> Iterator[str]:
    with serving(engine, limits=LIMITS) as url:
        yield url


@pytest.fixture(scope="module")
def video(http: httpx.Client) -> str:
    return http.post(f"{VIDEOS}/sync", json=QUICK).headers["x-job-id"]


def jobs(engine: Fake) -> int:
    return sum(engine.store.counts().values())


def check(answer: httpx.Response, each: Case, folder: Path) -> None:
    if answer.status_code >= 400:
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(answer.text) < 2000
        assert not [leak for leak in (*LEAKS, str(folder)) if leak in answer.text and leak not in each.name]
    assert "set-cookie" not in answer.headers
    assert answer.headers.get("x-request-id") != "mine"


def test_there_are_three_hundred_that_are_forbidden() -> None:
    assert len({each.name for each in CASES}) == len(CASES)
    assert len(FORBIDDEN) >= 300


@pytest.mark.parametrize("each", CASES, ids=[each.name[:60] for each in CASES])
def test_hostile(http: httpx.Client, engine: Fake, video: str, each: Case) -> None:
    before = jobs(engine)
    answer = each.send(http, video)
    assert answer.status_code in each.statuses, answer.text[:500]
    check(answer, each, engine.disk.of(video).parent)
    if answer.status_code >= 400:
        assert jobs(engine) == before, "what is refused is not queued"
    assert http.get("/live").status_code == 200


def test_afterwards_nothing_is_outside_and_all_is_well(http: httpx.Client, engine: Fake, video: str) -> None:
    until(lambda: not engine.store.active(), seconds=60)  # what was taken is still being written
    folder = engine.disk.of(video).parent
    names = {path.name for path in folder.rglob("*") if path.is_file()}
    assert names <= {"output.mp4", "output.png", "reference.png", ".thumbnail.webp"}
    made = http.post(f"{VIDEOS}/sync", json=QUICK)
    assert made.content[4:8] == b"ftyp"
    assert http.get("/health").json() == {"status": "ok"}


def test_hostile_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same answers, or that the disk is full; never a fault, and nothing is taken."""
    with (
        made(tmp_path, limit=500, largest=2**18) as engine,
        serving(engine, limits=LIMITS) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        video = http.post(f"{VIDEOS}/sync", json=QUICK).headers["x-job-id"]
        Injected(engine.store, monkeypatch).is_full = True
        before, full = jobs(engine), 0
        for each in CASES:
            if each.send.__qualname__.startswith("words"):
                continue  # these need a job
            answer = each.send(http, video)
            if answer.status_code == 503:
                assert answer.json()["error"]["code"] == "disk_full", each.name
                full += 1
            else:
                assert answer.status_code in each.statuses, (each.name, answer.text[:300])
            check(answer, each, tmp_path)
        assert full > 20
        assert jobs(engine) == before
        assert http.get("/health").json()["status"] == "disk_full"
        for variant in ("video", "thumbnail", "spritesheet"):
            assert http.get(f"{VIDEOS}/{video}/content", params={"variant": variant}).status_code == 200
        monkeypatch.undo()
        assert http.delete(f"{VIDEOS}/{video}").status_code == 200
