"""Run a command and watch where its processes listen, while a canary is thrown at each of their ports.

    python -m tests.watch REPORT SECONDS [--serve] -- COMMAND …

The canary is a pickle that, loaded, makes a file. It is sent every 50 ms to every port that the command's
processes listen on, as it is and as a value for torch's store, until the command ends, or is ended after
SECONDS. With --serve the command is `weft serve`: once it is ready a rank is killed, and it is ended when it
is ready again.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

PERIOD_SECONDS = 0.05
LISTEN = "0A"
STORE = b"\x00" + struct.pack("<I", 0x3C85F7CE)  # torch's greeting, before a query
SET = 1


def listening(pids: list[int]) -> set[tuple[str, int]]:
    """Return the addresses that some processes listen at, by /proc, in their own network namespace."""
    inodes: set[str] = set()
    found: set[tuple[str, int]] = set()
    for pid in pids:
        with suppress(OSError):
            for entry in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = str(entry.readlink())
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    for pid in pids[:1]:
        for table in ("tcp", "tcp6"):
            with suppress(OSError):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    words = line.split()
                    if words[3] == LISTEN and words[9] in inodes:
                        address, _, port = words[1].partition(":")
                        found.add((_address(address), int(port, 16)))
    return found


def _address(digits: str) -> str:
    words = [struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))


def canary(path: Path) -> bytes:
    """Return a pickle whose loading makes a file at `path`."""
    return b"cos\nsystem\n(Vtouch " + str(path).encode() + b"\ntR."


class Watch:
    """Follows the tree of a process until `end`."""

    def __init__(self, pid: int, pickle: bytes) -> None:
        self.pid, self.pickle = pid, pickle
        self.addresses: set[tuple[str, int]] = set()
        self.sent = 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _loop(self) -> None:
        key, value = b"canary", self.pickle
        query = bytes([SET]) + struct.pack("<Q", len(key)) + key + struct.pack("<Q", len(value)) + value
        while not self._over.wait(PERIOD_SECONDS):
            for address, port in self._listening():
                for message in (self.pickle, STORE + query):
                    with suppress(OSError), socket.create_connection((address, port), timeout=0.2) as there:
                        there.sendall(message)
                        self.sent += 1

    def _listening(self) -> set[tuple[str, int]]:
        try:
            root = psutil.Process(self.pid)
            pids = [self.pid, *(child.pid for child in root.children(recursive=True))]
        except psutil.Error:
            return set()
        now = listening(pids)
        self.addresses |= now
        # One that listens everywhere is reached at loopback too.
        local = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return {(local.get(address, address.removeprefix("::ffff:")), port) for address, port in now}


def serve(process: subprocess.Popen[str], deadline: float) -> dict[str, Any]:
    """Wait until a server is ready, kill a rank, wait until it is ready again, and end it."""
    assert process.stdout is not None
    url = next(word for word in process.stdout.readline().split() if word.startswith("http://"))

    def get(path: str) -> dict[str, Any]:
        with urllib.request.urlopen(url + path, timeout=30) as answer:
            return json.load(answer)

    os.kill(get("/v1/status")["ranks"][-1]["pid"], signal.SIGKILL)
    restarts = 0
    while time.monotonic() < deadline:
        status = get("/v1/status")
        restarts = status["restarts"]
        if restarts and status["status"] == "ok":
            break
        time.sleep(0.1)
    process.terminate()
    return {"restarts": restarts}


def main() -> None:
    report, seconds, *words = sys.argv[1:]
    at = words.index("--")
    served, command = "--serve" in words[:at], words[at + 1 :]
    flag = Path(f"{report}.ran")
    deadline = time.monotonic() + float(seconds)
    # Output as it comes: the watched processes inherit it.
    process = subprocess.Popen(command, stdout=subprocess.PIPE if served else None, text=True)
    watch = Watch(process.pid, canary(flag))
    about: dict[str, Any] = {}
    try:
        if served:
            about = serve(process, deadline)
        with suppress(subprocess.TimeoutExpired):
            process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
        watch.end()
    about |= {"code": process.returncode, "sent": watch.sent, "ran": flag.exists()}
    Path(report).write_text(json.dumps(about | {"addresses": sorted({each for each, _ in watch.addresses})}))


if __name__ == "__main__":
    main()
