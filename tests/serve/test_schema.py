"""Requests made from our own OpenAPI document: no fault, and no answer that it does not describe."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.serve.fake import Fake, made
from tests.serve.full_disk import Injected
from tests.serve.hosting import until
from weft.serve.api.app import create_app
from weft.serve.api.limits import RequestLimits
from weft.serve.jobs import GenerationParams

schemathesis = pytest.importorskip("schemathesis")
from schemathesis.checks import not_a_server_error  # noqa: E402
from schemathesis.generation import GenerationMode  # noqa: E402
from schemathesis.specs.openapi.checks import positive_data_acceptance  # noqa: E402

HERE = {"host": "127.0.0.1"}
MODES = list(GenerationMode)
RULES = ("POST /v1/videos", "POST /v1/videos/sync", "POST /v1/images/generations", "GET /v1/plan")
"""The model has rules that no schema has: sizes that it makes, fields that it takes."""
BEYOND = [positive_data_acceptance]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    with made(tmp_path_factory.mktemp("jobs"), limit=8, largest=2**17) as engine:
        yield engine


@pytest.fixture(scope="module")
def schema(engine: Fake) -> Any:
    return schemathesis.openapi.from_asgi(
        "/openapi.json", create_app(engine, limits=RequestLimits()), headers=HERE
    )


@contextmanager
def full(engine: Fake, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """No write to the disk succeeds, but the jobs that `there` needs are there."""
    kept = {kind: there(engine, kind) for kind in ("video", "image")}
    while engine.store.active():
        time.sleep(0.01)
    Injected(engine.store, patch).is_full = True
    patch.setattr("tests.serve.test_schema.there", lambda _, kind: kept[kind])
    patch.setattr("tests.serve.test_schema.FULL", True)
    try:
        yield
    finally:
        patch.undo()
        until(lambda: not engine.store.reserve.is_full)


FULL = False


def no_fault(_: Any, response: Any, __: Any) -> None:
    """In place of schemathesis' own check: on a full disk 503 is right, with the code for it."""
    if response.status_code >= 500:
        assert (FULL, response.status_code) == (True, 503), response.content[:500]
        assert b"disk_full" in response.content
    assert b"/tmp" not in response.content


def there(engine: Fake, kind: Any) -> str:
    """The id of a job, so that not every request ends with 404."""
    asked = GenerationParams(
        kind=kind, model="shapes", prompt="a cat", frames=1, height=8, width=8, steps=2, seed=0,
        format="mp4" if kind == "video" else "png",
    )  # fmt: skip
    while engine.store.active():
        time.sleep(0.01)
    return engine.submit(asked).id


def run(strategy: Any, examples: int, excluded: list[Any]) -> int:
    tried = 0

    @seed(20_2611)
    @settings(
        max_examples=examples, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )  # fmt: skip
    @given(case=strategy)
    def one(case: Any) -> None:
        nonlocal tried
        tried += 1
        excluding = [*excluded, not_a_server_error] + [positive_data_acceptance] * FULL
        checks: Any = {"additional_checks": [no_fault], "excluded_checks": excluding}
        case.call_and_validate(headers=HERE, timeout=200, **checks)

    one()
    return tried


def try_all(schema: Any, engine: Fake, mode: Any, examples: int) -> int:
    """So many requests to each operation; how many there were."""
    tried = 0
    for operation in (result.ok() for result in schema.get_all_operations()):
        kind = operation.path.split("/")[2].rstrip("s") if "/{id}" in operation.path else None
        if mode.is_negative and not (operation.query or operation.body):
            continue  # nothing that could be wrong
        for known in (False, True) if kind in ("video", "image") else (False,):
            path = {"id": there(engine, kind)} if known else None
            strategy = operation.as_strategy(generation_mode=mode, path_parameters=path)
            tried += run(strategy, examples, BEYOND if operation.label in RULES else [])
    return tried


@pytest.mark.parametrize("mode", MODES)
def test_what_the_document_allows_and_forbids_is_answered_as_it_says(
    schema: Any, engine: Fake, mode: Any
) -> None:
    assert try_all(schema, engine, mode, 10) > 60


@pytest.mark.parametrize("mode", MODES)
def test_on_a_full_disk_too(schema: Any, engine: Fake, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with full(engine, monkeypatch):
        assert try_all(schema, engine, mode, 4) > 24


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("disk", ["room", "full"])
def test_five_thousand_requests(
    schema: Any, engine: Fake, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with full(engine, monkeypatch) if disk == "full" else nullcontext():
        tried = sum(try_all(schema, engine, mode, 170) for mode in MODES)
    logging.getLogger(__name__).warning("%d requests on a disk with %s", tried, disk)
    assert tried >= 2500  # of each disk
