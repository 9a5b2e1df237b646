"""A server with an engine that has no ranks, one for each file; some files have another in its place."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.serve.fake import Fake, made, serving


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fake]:
    with made(tmp_path_factory.mktemp("jobs")) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Fake) -> Iterator[str]:
    with serving(engine) as url:
        yield url


@pytest.fixture(scope="module")
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, timeout=60) as http:
        yield http
