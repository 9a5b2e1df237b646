"""Refusals: type, headers and words."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from weft.serve import api_error
from weft.serve.api.schemas import ImageRequest, VideoRequest
from weft.serve.api_error import APIError, error_of_status, quote_input, validation_error, without_paths


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "invalid_request_error"), (409, "invalid_request_error"), (429, "rate_limit_error"),
        (500, "server_error"), (503, "server_error"),
    ],
)  # fmt: skip
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    body = APIError(status, "code", "words", param="field").body()
    assert body == {"error": {"message": "words", "type": kind, "param": "field", "code": "code"}}


def test_clients_are_told_whether_to_try_again() -> None:
    assert APIError(429, "queue_full", "").headers() == {"Retry-After": "5"}
    assert APIError(503, "starting", "", retry=0.2).headers() == {"Retry-After": "1"}
    assert APIError(409, "video_not_ready", "").headers() == {"x-should-retry": "false"}
    assert APIError(500, "internal_error", "").headers() == {"x-should-retry": "false"}
    assert APIError(400, "bad_request", "").headers() == {}
    assert error_of_status(418, "").code == "bad_request"
    assert error_of_status(502, "").code == "internal_error"


def refusal(kind: type[VideoRequest] | type[ImageRequest], body: str) -> APIError:
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(body, strict=True)
    return validation_error(error.value.errors(include_url=False), [*kind.model_fields])


def test_the_unknown_and_the_missing_come_before_what_follows_from_them() -> None:
    refused = refusal(VideoRequest, '{"seed": "x", "promt": "a cat"}')
    assert (refused.code, refused.param) in [("missing_prompt", "prompt"), ("unknown_field", "promt")]
    refused = refusal(VideoRequest, '{"prompt": "a", "seed": "x", "sedd": 1}')
    assert (refused.code, refused.message) == (
        "unknown_field",
        "Unknown field 'sedd'. Did you mean 'seed'?",
    )


def test_a_long_name_is_not_compared_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing megabytes takes a hundred times as much memory."""
    compared: list[str] = []
    monkeypatch.setattr(api_error, "nearest_of", lambda name, _: compared.append(name) or "")
    assert refusal(VideoRequest, '{"prompt": "a", "%s": 1}' % ("x" * 10_000)).code == "unknown_field"
    assert len(compared[0]) <= 100


def test_a_field_that_may_be_two_things_has_one_name() -> None:
    refused = refusal(VideoRequest, '{"prompt": "a", "seconds": []}')
    assert (refused.code, refused.param) == ("invalid_seconds", "seconds")
    refused = refusal(ImageRequest, '{"prompt": "a", "size": 5}')
    assert (refused.code, refused.param) == ("invalid_size", "size")


def test_what_was_given_is_shown_short_and_on_one_line() -> None:
    assert quote_input("a\r\nb") == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"
    assert len(quote_input("x" * 10_000)) == 61
    assert (quote_input([[[]]]), quote_input({"a": 1}), quote_input(None), quote_input(1.5)) == (
        "(a list)",
        "(an object)",
        "null",
        "1.5",
    )


@pytest.mark.parametrize(
    ("text", "public"),
    [
        ("/root/models/wan/model_index.json cannot be read.", "model_index.json cannot be read."),
        ("[Errno 2] No such file: '/srv/my models/m/x.bin'", "[Errno 2] No such file: 'x.bin'"),
        ("[Errno 2] No such file: '/home/jo doe/my x.bin'", "[Errno 2] No such file: 'my x.bin'"),
        ("see ~/secrets/key, or file:///etc/passwd", "see key, or passwd"),
        ("(/a/b/c.py:12)", "(c.py:12)"),
        ("/srv/my models/m is no model", "m is no model"),
        ("/srv/my models/m/config.json: bad", "config.json: bad"),
        ("10 MB/s and/or 3/4; POST x", "10 MB/s and/or 3/4; POST x"),
        ("", ""),
    ],
)
def test_errors_of_the_inside_are_told_without_paths(text: str, public: str) -> None:
    assert without_paths(text, Path("/srv/my models/m"), Path("/srv")) == public
