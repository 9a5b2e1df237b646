"""Auth: who may ask. A key, or only this machine; never another site's page in a browser on it."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from weft.core.errors import InputError
from weft.serve.errors import Refused, shown

SAFE = ("GET", "HEAD", "OPTIONS")
OPEN = ("/", "/live", "/health")
"""What needs no key: probes, and the page that asks for it."""
SHORTEST = 16


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(host: str, key: str | None) -> None:
    """Refuses to let a whole network use the server without a key."""
    if key is None and not is_loopback(host):
        raise InputError(
            f"--host {host} without a key would let everybody who reaches this machine use it.",
            hint="Give --api-key-file FILE, or bind to 127.0.0.1.",
        )


def read_key(path: Path) -> str:
    """The key in a file: one line, which a header can carry."""
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"The key file {path} cannot be read: {error}.", hint="Give a text file.") from error
    if len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(
            f"The key in {path} has {len(key)} characters, or some that a header cannot carry.",
            hint=f"A key has at least {SHORTEST}, letters, digits or signs: openssl rand -hex 32 makes one.",
        )
    return key


def check(method: str, path: str, headers: Mapping[str, str], key: str | None) -> None:
    """Refuses a request that may not be made; `headers` have names in lower case."""
    _check_origin(method, headers)
    if key is None:
        _check_host(headers)
    elif path not in OPEN and not path.startswith("/page/"):
        _check_key(headers, key)


def _check_key(headers: Mapping[str, str], key: str) -> None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    # Bytes: a str that is not ASCII would raise.
    same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), key.encode())
    if scheme.lower() != "bearer" or not same:
        what = "The key is not the server's." if given else "A key is missing."
        raise Refused(401, "invalid_api_key", f"{what} Send it as 'Authorization: Bearer KEY'.")


def _check_host(headers: Mapping[str, str]) -> None:
    """A name of somebody else's that leads here would make their page part of this site (DNS rebinding)."""
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name):
        message = f"Host {shown(host)!r} is not this machine. Use http://127.0.0.1 or http://localhost."
        raise Refused(403, "forbidden_host", message)


def _check_origin(method: str, headers: Mapping[str, str]) -> None:
    """Browsers send what other sites ask them to, and say so."""
    if method in SAFE:
        return
    site, origin = headers.get("sec-fetch-site"), headers.get("origin")
    foreign = origin is not None and urlsplit_host(origin) != headers.get("host", "").lower()
    if foreign or site in ("cross-site", "same-site"):
        message = (
            f"A page of another site ({shown(origin or site)}) may not do this. Use the server's own page."
        )
        raise Refused(403, "cross_origin", message)


def urlsplit_host(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
