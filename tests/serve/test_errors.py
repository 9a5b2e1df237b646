"""Refusals: type, headers and words."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from weft.serve import errors
from weft.serve.errors import Refused, by_status, invalid, shown, without_paths
from weft.serve.wire import ImageAsks, VideoAsks


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"), (401, "authentication_error"), (403, "permission_error"),
        (404, "invalid_request_error"), (409, "invalid_request_error"), (429, "rate_limit_error"),
        (500, "server_error"), (503, "server_error"),
    ],
)  # fmt: skip
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    body = Refused(status, "code", "words", param="field").body()
    assert body == {"error": {"message": "words", "type": kind, "param": "field", "code": "code"}}


def test_clients_are_told_whether_to_try_again() -> None:
    assert Refused(429, "queue_full", "").headers() == {"Retry-After": "5"}
    assert Refused(503, "starting", "", retry=0.2).headers() == {"Retry-After": "1"}
    assert Refused(409, "video_not_ready", "").headers() == {"x-should-retry": "false"}
    assert Refused(500, "internal_error", "").headers() == {"x-should-retry": "false"}
    assert Refused(400, "bad_request", "").headers() == {}
    assert by_status(418, "").code == "bad_request"
    assert by_status(502, "").code == "internal_error"


def refusal(kind: type[VideoAsks] | type[ImageAsks], body: str) -> Refused:
    with pytest.raises(ValidationError) as error:
        kind.model_validate_json(body, strict=True)
    return invalid(error.value.errors(include_url=False), [*kind.model_fields])


def test_the_unknown_and_the_missing_come_before_what_follows_from_them() -> None:
    refused = refusal(VideoAsks, '{"seed": "x", "promt": "a cat"}')
    assert (refused.code, refused.param) in [("missing_prompt", "prompt"), ("unknown_field", "promt")]
    refused = refusal(VideoAsks, '{"prompt": "a", "seed": "x", "sedd": 1}')
    assert (refused.code, refused.message) == (
        "unknown_field",
        "There is no field 'sedd'. Did you mean 'seed'?",
    )


def test_a_long_name_is_not_compared_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing megabytes takes a hundred times as much memory."""
    compared: list[str] = []
    monkeypatch.setattr(errors, "nearest_of", lambda name, _: compared.append(name) or "")
    assert refusal(VideoAsks, '{"prompt": "a", "%s": 1}' % ("x" * 10_000)).code == "unknown_field"
    assert len(compared[0]) <= 100


def test_a_field_that_may_be_two_things_has_one_name() -> None:
    refused = refusal(VideoAsks, '{"prompt": "a", "seconds": []}')
    assert (refused.code, refused.param) == ("invalid_seconds", "seconds")
    refused = refusal(ImageAsks, '{"prompt": "a", "size": 5}')
    assert (refused.code, refused.param) == ("invalid_size", "size")


def test_what_was_given_is_shown_short_and_on_one_line() -> None:
    assert shown("a\r\nb") == "a\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}b"
    assert len(shown("x" * 10_000)) == 61
    assert (shown([[[]]]), shown({"a": 1}), shown(None), shown(1.5)) == (
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
