"""Errors: everything that a client is refused, in the one envelope that OpenAI's clients read."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError, nearest_of

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {
    400: "bad_request", 404: "not_found", 405: "method_not_allowed", 408: "body_timeout",
    413: "input_too_large", 415: "unsupported_media_type", 416: "range_not_satisfiable",
    500: "internal_error", 503: "unavailable",
}  # fmt: skip
AGAIN = {429: 5, 503: 2}
"""Seconds that a client is asked to wait where nobody knows better."""
WORDS = {dict: "(an object)", list: "(a list)", type(None): "null"}
MOST_WORDS = 500
SHOWN = 60
"""Characters of what was given that a message repeats."""


# In quotes, as Python has them in its errors, a path may hold anything. After a letter, a digit or a dot a
# slash is no root: "and/or", "10 MB/s", "a.b/c".
_PATH = re.compile(
    r"""(?<=(['"]))(?:file://|~)?/[^'"]+(?=\1)|(?:file://|(?<![\w./\])}])~?)/[^\s'"<>|,;:()\[\]{}]+"""
)


class Refused(Exception):  # noqa: N818 - a refusal is an answer, not a fault
    """An answer other than what was asked for: its status, a code for programs, a message for people."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry: float | None = None,
        close: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(status, code, message)
        self.close = close or status in (408, 413)  # the rest of the body is not read
        self.status, self.code, self.message, self.param = status, code, message, param
        self.retry = AGAIN.get(status) if retry is None else retry

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry is not None:
            headers["Retry-After"] = str(max(1, round(self.retry)))
        if self.status in (408, 409) or (self.status >= 500 and self.retry is None):
            headers["x-should-retry"] = "false"  # OpenAI's clients send these again, to the same end
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.close:
            headers["Connection"] = "close"
        return headers


def by_status(status: int, message: str) -> Refused:
    """A refusal that a framework only gives the status of."""
    return Refused(status, CODES.get(status, "bad_request" if status < 500 else "internal_error"), message)


def disk_full() -> Refused:
    message = "The disk space for results is used up. Delete some, or try again when they expire."
    return Refused(503, "disk_full", message, retry=60)


def invalid(errors: Sequence[Mapping[str, Any]], known: Sequence[str] = ()) -> Refused:
    """The first of pydantic's errors as a refusal; `known` are all fields that there are, also inner ones."""
    # A field that is missing or unknown explains the others.
    first = min(errors, key=lambda e: e["type"] not in ("missing", "extra_forbidden"))
    place = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    if first["type"] == "json_invalid" or not place:
        reason = first.get("ctx", {}).get("error", first["msg"])
        return Refused(400, "invalid_json", f"The body is not a JSON object: {reason}.")
    if first["type"] == "extra_forbidden":
        param = shown(".".join(place))
        message = f"There is no field {param!r}. {nearest_of(place[-1][:100], known)}"
        return Refused(400, "unknown_field", message, param=param)
    # Of a field that may be one of several types, pydantic's place goes on with the type.
    name, param = place[0], ".".join(part for part in place if part in known) or place[0]
    if first["type"] == "missing":
        return Refused(400, f"missing_{name}", f"{param} is missing; it is required.", param=param)
    rule = first["msg"][:1].lower() + first["msg"][1:]
    message = f"{param} {shown(first.get('input'))!s} is not legal: {rule}."
    return Refused(400, f"invalid_{name}", message, param=param)


def shown(given: Any) -> str:
    """What was given, short, and on one line."""
    text = given if isinstance(given, str) else WORDS.get(type(given)) or repr(given)
    text = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: SHOWN + 1])
    return text if len(text) <= SHOWN else text[:SHOWN] + "…"


def without_paths(text: str, *roots: Path) -> str:
    """An internal error as clients may read it: of each path of this machine only the last name is left.

    roots   paths that are known, and may hold spaces; others that do are only recognized in quotes.
    """
    for root in sorted(map(str, roots), key=len, reverse=True):
        text = text.replace(root, f"/{Path(root).name}")
    return _PATH.sub(lambda found: found[0].rstrip("/").rpartition("/")[2], text)


def is_out_of_files(error: BaseException | None) -> bool:
    """Whether no descriptor was free, as in a flood of connections, which goes by."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return isinstance(error, WeftError) and is_out_of_files(error.__cause__)


def words(error: BaseException) -> str:
    """An error as one line; our own are sentences, others need their name."""
    message = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())[:MOST_WORDS]
