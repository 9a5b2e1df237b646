"""Health probe: ask `/health` again and again through a storm, and judge each answer by what is known."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

PROBE_SECONDS = 0.2
ANSWER_SECONDS = 10.0
"""In which `/health` must be answered while the server lives; generous, for a machine that has much to do."""
NOTICE_SECONDS = 4.0
"""After which a disk that is full, or has room again, must have been noticed."""


class HealthProbe:
    """Probe in a thread between `start` and `stop`.

    disk   returns "full", "room" or "" (not known), and since when.
    """

    def __init__(self, port: int, disk: Callable[[], tuple[str, float]]) -> None:
        self.counts: Counter[str] = Counter()
        self.false: list[str] = []
        self.slowest = 0.0
        self._port, self._disk = port, disk
        self._lives, self._answered, self._is_down = 0, -1, False
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def server_is_killed(self) -> None:
        """Call before; no answer is fine from now until the first after `server_is_started`."""
        self._is_down = True

    def server_is_started(self) -> None:
        self._lives += 1
        self._is_down = False

    def _run(self) -> None:
        while not self._over.wait(PROBE_SECONDS):
            life, was_down = self._lives, self._is_down
            disk, began = self._disk(), time.monotonic()
            asked = began
            try:
                before = self._status()
                asked = time.monotonic()
                code, health = self._get("/health")
                took = time.monotonic() - asked
                after = self._status()
            except (OSError, http.client.HTTPException, ValueError) as error:
                is_excused = was_down or self._is_down or life != self._lives or self._answered != life
                self.counts["not answered as it was killed" if is_excused else "not answered"] += 1
                if not is_excused:
                    self.false.append(f"not answered: {error!r} after {time.monotonic() - asked:.1f} s")
                continue
            if was_down or self._is_down or life != self._lives:
                continue
            self._answered, self.slowest = life, max(self.slowest, took)
            self.counts[str(health.get("status"))] += 1
            is_stable = disk == self._disk() and began - disk[1] > NOTICE_SECONDS
            if wrong := judge(code, health, before, after, disk[0] if is_stable else ""):
                self.false.append(f"{wrong}: {code} {health}; status {before} and {after}")

    def _status(self) -> dict[str, Any]:
        """What tells how the ranks are; nothing if the server is too busy to say it in time."""
        try:
            code, status = self._get("/v1/status")
        except TimeoutError:
            self.counts["no /v1/status in time"] += 1
            return {}
        return {name: status[name] for name in ("status", "restarts")} if code == 200 else {}

    def _get(self, path: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())
        finally:
            connection.close()


def judge(code: int, health: dict[str, Any], before: dict[str, Any], after: dict[str, Any], disk: str) -> str:
    """Return what is false about an answer of `/health`, given `/v1/status` right before and after it."""
    state = health.get("status")
    if (code == 200) != (state == "ok"):
        return "the status code and the text differ"
    if not before or not after:
        return ""
    # A restart in between counts; ranks that are ready again without one were ready all the time.
    if before["status"] == after["status"] == "ok" and before["restarts"] == after["restarts"]:
        if state not in ("ok", "disk_full"):
            return "the ranks are ready"
        if disk == "full" and state == "ok":
            return "the disk is full"
        if disk == "room" and state == "disk_full":
            return "the disk has room"
    elif code == 200 and "ok" not in (before["status"], after["status"]):
        return "the ranks are not ready"
    return ""
