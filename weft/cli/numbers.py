"""Parse numbers of the command line: 2,3 or 8, 832x480, 24h, 10GiB, 10.0.0.1:29500."""

from __future__ import annotations

import os
import re

from weft.core.errors import InputError

MASTER_PORT = "29500"  # torch's
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
BYTES = {
    "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip


def counts(text: str, name: str) -> list[int]:
    """Parse positive integers separated by commas."""
    parts = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and int(word) > 0 for word in parts):
        raise InputError(f"{name}={text!r} is not a list of counts.", hint="Write 2 or 2,3,4.")
    return [int(word) for word in parts]


def sizes(text: str, words: str, such: str) -> tuple[int, ...]:
    """Parse positive integers separated by x, one for each word of `words`.

    >>> sizes("832x480", "width x height", "1280x720")
    (832, 480)
    """
    parts = text.replace("×", "x").split("x")
    if len(parts) != len(words.split(" x ")) or not all(p.isdecimal() and int(p) for p in parts):
        raise InputError(f"{text!r} is not {words}.", hint=f"Write it like {such}.")
    return tuple(map(int, parts))


def duration(text: str, name: str) -> float:
    """
    >>> duration("24h", "ttl"), duration("1.5 m", "ttl")
    (86400.0, 90.0)
    """
    return _with_unit(text, name, SECONDS, "30s, 15m, 24h or 7d")


def amount(text: str, name: str) -> int:
    """Parse a number of bytes with a unit.

    >>> amount("10GiB", "quota"), amount("500 MB", "quota")
    (10737418240, 500000000)
    """
    return int(_with_unit(text, name, BYTES, "500MB or 10GiB"))


def meeting_point(master: str, nodes: int) -> tuple[str, int]:
    """Return the host and port at which machine 0 listens; of Slurm's list of nodes, the first.

    >>> meeting_point("10.0.0.1:29501", nodes=2), meeting_point("gpu[03-04,09],login1", nodes=3)
    (('10.0.0.1', 29501), ('gpu03', 29500))
    """
    first = re.sub(r"\[(\d+)[\d,-]*\]", r"\1", master).partition(",")[0]
    host, _, port = first.rpartition(":")
    if not re.search(r"[^:]:[^:\]]*$", first):  # no port, though an IPv6 address has colons
        host, port = first, os.environ.get("PET_MASTER_PORT") or MASTER_PORT
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(
            f"--master must be HOST or HOST:PORT of machine 0 of {nodes}, got {master!r}.",
            hint="Pass the same address on every machine, such as 10.0.0.1:29500.",
        )
    return host.strip("[]"), int(port)


def _with_unit(text: str, name: str, units: dict[str, int], such: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([A-Za-z]+)", text.strip())
    if match is None or match[2] not in units or not float(match[1]):
        raise InputError(f"{name}={text!r} is not a number with a unit.", hint=f"Write {such}.")
    return float(match[1]) * units[match[2]]
