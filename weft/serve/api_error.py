"""APIError: a request that is answered with an error, in the envelope that OpenAI's clients read."""

from __future__ import annotations

import errno
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError, nearest_of

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {404: "not_found", 416: "range_not_satisfiable"}
RETRY_SECONDS = {429: 5, 503: 2}
"""Defaults of Retry-After."""
TYPE_NAMES = {dict: "(an object)", list: "(a list)", type(None): "null"}
MAX_MESSAGE_CHARS = 500
MAX_QUOTED_CHARS = 60


# In quotes, as Python has them in its errors, a path may hold anything. After a letter, a digit or a dot a
# slash is no root: "and/or", "10 MB/s", "a.b/c".
_PATH = re.compile(
    r"""(?<=(['"]))(?:file://|~)?/[^'"]+(?=\1)|(?:file://|(?<![\w./\])}])~?)/[^\s'"<>|,;:()\[\]{}]+"""
)


class APIError(Exception):
    """An error response: its status, a code for programs, a message for people."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry: float | None = None,
        close: bool = False, allow: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(status, code, message)
        self.close = close or status in (408, 413)  # the rest of the body is not read
        self.status, self.code, self.message, self.param = status, code, message, param
        self.allow = allow
        self.retry = RETRY_SECONDS.get(status) if retry is None else retry

    def body(self) -> dict[str, dict[str, str | None]]:
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry is not None:
            headers["Retry-After"] = str(max(1, round(self.retry)))
        if self.status in (408, 409) or (self.status >= 500 and self.retry is None):
            headers["x-should-retry"] = "false"  # OpenAI's clients retry these, with the same result
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        if self.allow is not None:
            headers["Allow"] = self.allow
        if self.close:
            headers["Connection"] = "close"
        return headers


def error_of_status(status: int, message: str) -> APIError:
    """Return the error of a status without a code of its own."""
    return APIError(status, CODES.get(status, "bad_request" if status < 500 else "internal_error"), message)


def not_ready(state: str) -> APIError:
    """Return the error of a server that takes no jobs in this state."""
    if state == "draining":
        message = "The server is stopping and takes no new work. Try again later."
        return APIError(503, state, message, retry=30)
    if state == "failed":
        message = "The ranks failed to start; the log of the server has the reason."
        return APIError(503, state, message, retry=30)
    return APIError(503, "starting", "The model is still loading. Poll GET /health until it is ready.")


def disk_full() -> APIError:
    message = "The disk space for results is used up. Delete some, or try again when they expire."
    return APIError(503, "disk_full", message, retry=60)


def validation_error(errors: Sequence[Mapping[str, Any]], known: Sequence[str] = ()) -> APIError:
    """Return the first of pydantic's errors; `known` are the names of all fields, also of nested ones."""
    # A field that is missing or unknown explains the others.
    first = min(errors, key=lambda e: e["type"] not in ("missing", "extra_forbidden"))
    place = [str(name) for name in first["loc"] if name not in ("body", "query", "path", "header")]
    if first["type"] == "json_invalid" or not place:
        reason = first.get("ctx", {}).get("error", first["msg"])
        return APIError(400, "invalid_json", f"The body is not a JSON object: {reason}.")
    if first["type"] == "extra_forbidden":
        param = quote_input(".".join(place))
        message = f"Unknown field {param!r}. {nearest_of(place[-1][:100], known)}"
        return APIError(400, "unknown_field", message, param=param)
    # For a field of several possible types, pydantic appends the type to the location.
    name, param = place[0], ".".join(name for name in place if name in known) or place[0]
    if first["type"] == "missing":
        return APIError(400, f"missing_{name}", f"{param} is required.", param=param)
    rule = first["msg"][:1].lower() + first["msg"][1:]
    message = f"{param} {quote_input(first.get('input'))!s} is invalid: {rule}."
    return APIError(400, f"invalid_{name}", message, param=param)


def quote_input(value: object) -> str:
    """Format a value that a client sent: short, and on one line."""
    text = value if isinstance(value, str) else TYPE_NAMES.get(type(value)) or repr(value)
    text = "".join(
        c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text[: MAX_QUOTED_CHARS + 1]
    )
    return text if len(text) <= MAX_QUOTED_CHARS else text[:MAX_QUOTED_CHARS] + "…"


def without_paths(text: str, *roots: Path) -> str:
    """Replace paths of this machine in an internal error by their last names, for clients to read.

    roots   known paths, which may contain spaces; others that do are only recognized in quotes.
    """
    for root in sorted(map(str, roots), key=len, reverse=True):
        text = text.replace(root, f"/{Path(root).name}")
    return _PATH.sub(lambda match: match[0].rstrip("/").rpartition("/")[2], text)


def is_out_of_descriptors(error: BaseException | None) -> bool:
    """Return whether no file descriptor was free, as in a flood of connections, which passes."""
    if isinstance(error, OSError):
        return error.errno in (errno.EMFILE, errno.ENFILE)
    return isinstance(error, WeftError) and is_out_of_descriptors(error.__cause__)


def one_line(error: BaseException) -> str:
    """Format an error as one line, with its type unless it is one of weft's."""
    message = str(error) if isinstance(error, WeftError) else f"{type(error).__name__}: {error}"
    return " ".join(message.split())[:MAX_MESSAGE_CHARS]
