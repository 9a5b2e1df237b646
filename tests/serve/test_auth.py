"""Who may ask: the key, this machine, and no other site's page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serve.fake import Fake, serving
from weft.core.errors import InputError
from weft.serve.api import auth

KEY = "correct-horse-battery-staple"


@pytest.fixture(scope="module")
def locked(engine: Fake) -> Iterator[httpx.Client]:
    with serving(engine, key=KEY) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


@pytest.fixture(scope="module")
def here(engine: Fake) -> Iterator[httpx.Client]:
    with serving(engine) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


@pytest.mark.parametrize("given", [None, "", KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY}x", "Bearer é"])
@pytest.mark.parametrize("path", ["/v1/videos", "/v1/status", "/metrics", "/openapi.json", "/nothing"])
def test_no_key_no_answer(locked: httpx.Client, given: str | None, path: str) -> None:
    headers = {} if given is None else {"authorization": given.encode("latin-1")}
    answer = locked.get(path, headers=headers)  # type: ignore[arg-type] - bytes are legal
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["type"]) == (
        401,
        "invalid_api_key",
        "authentication_error",
    )
    assert answer.headers["www-authenticate"] == "Bearer"
    assert KEY not in answer.text


def test_the_key_opens(locked: httpx.Client) -> None:
    for scheme in ("Bearer", "bearer"):
        assert locked.get("/v1/videos", headers={"authorization": f"{scheme} {KEY}"}).status_code == 200
    named = {"authorization": f"Bearer {KEY}", "host": "weft.example"}
    assert locked.get("/v1/videos", headers=named).status_code == 200


@pytest.mark.parametrize("path", ["/", "/docs", "/live", "/health", "/page/page.js"])
def test_probes_and_the_page_need_no_key(locked: httpx.Client, path: str) -> None:
    assert locked.get(path).status_code == 200


def test_what_is_beside_the_page_needs_one(locked: httpx.Client) -> None:
    assert locked.get("/page/../v1/videos").status_code == 401
    assert locked.get("/page/%2e%2e/v1/videos").status_code in (401, 404)
    assert locked.get("//v1/videos").status_code == 401


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "evil.example:80", "", "[::1", "10.0.0.1"]
)
def test_without_a_key_only_this_machines_names_are_answered(here: httpx.Client, host: str) -> None:
    answer = here.get("/v1/videos", headers={"host": host})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "forbidden_host")
    assert answer.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "127.8.8.8", "[::1]:8000"])
def test_all_names_of_this_machine_are_answered(here: httpx.Client, host: str) -> None:
    assert here.get("/live", headers={"host": host}).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"},
        {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}, {"origin": "http://[x"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["POST", "DELETE"])
def test_another_sites_page_may_not_post(
    here: httpx.Client, locked: httpx.Client, headers: dict[str, str], method: str
) -> None:
    for http in (here, locked):
        answer = http.request(method, "/v1/videos", headers=headers | {"authorization": f"Bearer {KEY}"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "cross_origin")


def test_the_servers_own_page_may(here: httpx.Client) -> None:
    own = {"origin": str(here.base_url), "sec-fetch-site": "same-origin"}
    assert here.post("/v1/videos", json={"prompt": "a cat"}, headers=own).status_code == 200
    # An address that was typed in is not another site's.
    assert (
        here.post("/v1/videos", json={"prompt": "a"}, headers={"sec-fetch-site": "none"}).status_code == 200
    )


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "example.com", ""])
def test_a_network_is_not_served_without_a_key(host: str) -> None:
    with pytest.raises(InputError, match="--api-key-file"):
        auth.check_bind(host, None)
    auth.check_bind(host, KEY)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.1.2.3"])
def test_this_machine_needs_none(host: str) -> None:
    auth.check_bind(host, None)


def test_keys_are_read_from_files(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text(f"  {KEY}\n")
    assert auth.read_key(file) == KEY
    for bad in ("", "short", "é" * 20, "two words are not one", "a" * 16 + "\nb"):
        file.write_text(bad)
        with pytest.raises(InputError, match="characters"):
            auth.read_key(file)
    with pytest.raises(InputError, match="cannot be read"):
        auth.read_key(tmp_path / "none")
