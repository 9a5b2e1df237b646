"""Privacy: remove what a report must not reveal about the machine and its user.

Host names, user names, folders, addresses and values of environment variables get into a report only by
messages of other libraries. The whole report is cleaned here before anything is written.
"""

from __future__ import annotations

import getpass
import ipaddress
import math
import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

MIN_VALUE = 10
"""Characters of a variable's value that is removed; shorter ones are ordinary words and numbers."""
ORDINARY_NAMES = {"root", "user", "ubuntu", "admin", "runner", "localhost", "host", "vm"}
# Of "/home/a/.venv/lib/python3.12/site-packages/torch/x.py" only torch/x.py stays, and of weft's own, weft/….
PACKAGE = re.compile(r"(?<![\w.])/(?:[^\s\"'<>:/]+/)*(?:site-packages|dist-packages)/")
LIBRARY = re.compile(r"(?<![\w.])/(?:[^\s\"'<>:/]+/)*(?=python3\.\d+/)")
OWN = re.compile(r"(?<![\w.])/(?:[^\s\"'<>:/]+/)*(?=weft/(?:\w+/)*\w+\.py)")
FOLDER = re.compile(r"(?<![\w./<])(?:/[\w.@+~=,-]+)+/(?=[\w.@+~=,-])")
ADDRESS = re.compile(r"(?<![\w:.])[0-9A-Fa-f:.]{3,}(?![\w])|\[[0-9A-Fa-f:.]{3,}\]")


def private_words() -> list[str]:
    """Return the names of this host and user, and long values of its environment."""
    words = {socket.gethostname(), socket.gethostname().partition(".")[0], str(Path.home())}
    with suppress(OSError, KeyError):
        words.add(getpass.getuser())
    words.update(os.environ.get(name, "") for name in ("USER", "LOGNAME", "HOSTNAME"))
    words.update(
        value for value in os.environ.values() if len(value) >= MIN_VALUE and re.search("[A-Za-z]", value)
    )
    return sorted(word for word in words if len(word) > 2 and word.lower() not in ORDINARY_NAMES)


def cleaned(value: Any, words: Iterable[str]) -> Any:
    """Return a value for JSON without private words, folders and addresses; inf and nan are strings."""
    pattern = "|".join(map(_pattern, sorted(set(words), key=len, reverse=True)))
    return _cleaned(value, re.compile(pattern, re.IGNORECASE) if pattern else None)


def _pattern(word: str) -> str:
    """Return a pattern for a word; a short one must stand alone: "ann" is not removed from "channel"."""
    return re.escape(word) if len(word) >= MIN_VALUE else rf"(?<!\w){re.escape(word)}(?!\w)"


def _cleaned(value: Any, private: re.Pattern[str] | None) -> Any:
    if isinstance(value, str):
        return clean_text(value, private)
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return {name: _cleaned(each, private) for name, each in table.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each, private) for each in cast("list[Any]", value)]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def clean_text(text: str, private: re.Pattern[str] | None) -> str:
    for pattern in (PACKAGE, LIBRARY, OWN):
        text = pattern.sub("", text)
    if private is not None:
        text = private.sub("…", text)
    return ADDRESS.sub(_without_address, FOLDER.sub("…/", text))


def _without_address(match: re.Match[str]) -> str:
    text = match[0].strip("[]")
    # "10.0.0.1:29500" and "10.0.0.1:" are an address and more; an IPv6 address has colons of its own.
    for candidate in (text.rstrip("."), text.rstrip(":."), text.partition(":")[0]):
        with suppress(ValueError):
            address = ipaddress.ip_address(candidate)
            keep = address.is_loopback or address.is_unspecified
            return match[0] if keep else match[0].replace(candidate, "ADDRESS")
    return match[0]
