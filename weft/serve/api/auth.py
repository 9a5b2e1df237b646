"""Authentication: a key, or loopback only; never on behalf of another site's page in a browser."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from weft.core.errors import InputError
from weft.serve.api_error import APIError, quote_input

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")
PROBES = ("/live", "/health")
"""Answered without a key, and whatever the number of open requests."""
MIN_KEY_CHARS = 16


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(host: str, key: str | None) -> None:
    """Raise if a whole network could use the server without a key."""
    if key is None and not is_loopback(host):
        raise InputError(
            f"--host {host} requires a key: all of its network could use the server.",
            hint="Pass --api-key-file FILE, or bind to 127.0.0.1.",
        )


def read_key(path: Path) -> str:
    """Return the key in a file: one line, which a header can carry."""
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The key file {path} cannot be read: {error}.", hint="Pass a text file.") from error
    if len(key) < MIN_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(
            f"The key in {path} has {len(key)} characters, or some that a header cannot carry.",
            hint=f"A key has at least {MIN_KEY_CHARS}, letters, digits or signs; try openssl rand -hex 32.",
        )
    return key


def is_page(path: str) -> bool:
    """Return whether a path belongs to the page, which needs no key, since the user enters it there."""
    return path in ("/", "/docs") or path.startswith("/page/")


def check_request(method: str, path: str, headers: Mapping[str, str], key: str | None) -> None:
    """Raise for a request that is not allowed; `headers` have names in lower case."""
    _check_origin(method, headers)
    if key is None:
        _check_host(headers)
    elif path not in PROBES and not is_page(path):
        _check_key(headers, key)


def _check_key(headers: Mapping[str, str], key: str) -> None:
    scheme, _, sent = headers.get("authorization", "").partition(" ")
    # Bytes: a str that is not ASCII would raise.
    is_equal = hmac.compare_digest(sent.strip().encode("latin-1", "replace"), key.encode())
    if scheme.lower() != "bearer" or not is_equal:
        reason = "The key is wrong." if sent else "A key is required."
        raise APIError(401, "invalid_api_key", f"{reason} Send it as 'Authorization: Bearer KEY'.")


def _check_host(headers: Mapping[str, str]) -> None:
    """Reject other names: one of another site that leads here makes its page part of ours (DNS rebinding)."""
    host = headers.get("host", "")
    if not is_loopback(_split(f"//{host}").hostname or ""):
        message = f"Host {quote_input(host)!r} is not this machine. Use http://127.0.0.1 or http://localhost."
        raise APIError(403, "forbidden_host", message)


def _check_origin(method: str, headers: Mapping[str, str]) -> None:
    """Reject requests of a browser on behalf of another site, which these headers declare."""
    if method in SAFE_METHODS:
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    is_foreign = origin is not None and _split(origin).netloc.lower() != headers.get("host", "").lower()
    if is_foreign or site in ("cross-site", "same-site"):
        source = quote_input(origin or site)
        message = f"A page of another site ({source}) may not do this. Use the server's own page."
        raise APIError(403, "cross_origin", message)


def _split(url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError:
        return urlsplit("")
