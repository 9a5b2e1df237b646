"""Ranks that are threads and make nothing: what the engine's tests talk to instead of torch's processes."""

from __future__ import annotations

import hashlib
import json
import queue
import threading
from contextlib import suppress
from typing import Any

from weft.core.errors import CommError
from weft.run.secure import connect
from weft.serve.ranks import Ranks

FACTS: dict[str, Any] = {
    "model": "toy", "class": "Toy", "kinds": ["video", "image"], "frames": 16, "height": 64, "width": 64,
    "multiple": [4, 8, 8], "steps": 10, "guidance": 2.0, "fps": 8.0, "heads": 8, "head_dim": 32, "depth": 6,
    "width_model": 256, "patch": [4, 8, 8], "text_tokens": 8, "params": 5_700_000,
    "takes": ["prompt", "negative_prompt", "guidance_scale", "image"],
}  # fmt: skip


class ThreadRanks(Ranks):
    """Starts threads where `Ranks` starts an agent; `fail(number)` is what SIGKILL is to a process."""

    broken = ""
    """They cannot be imported (before `hello`), or not load the model (after `join`)."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.threads: dict[int, _Rank] = {}
        self.pace, self.poison = 0.002, ""
        self.paces: dict[str, float] = {}
        """Seconds of a step, of jobs of this prompt."""
        self.segments: list[tuple[str, tuple[int, ...], int]] = []
        """(batch, ranks, first step) of each that began."""

    def _start_agent(self) -> None:
        for number in range(self.world):
            self._start(number)

    def _start(self, number: int) -> None:
        self.threads[number] = _Rank(self, number)

    def look(self) -> None:
        for number, rank in list(self.threads.items()):
            if not rank.is_alive() and not self._closing:
                self._start(number)

    def fail(self, number: int) -> None:
        self.threads[number].end()


class _Rank(threading.Thread):
    def __init__(self, ranks: ThreadRanks, number: int) -> None:
        super().__init__(daemon=True)
        self.ranks, self.number, self.stops = ranks, number, set()
        self.gone = threading.Event()
        self.commands: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
        self.channel = connect(ranks.address, ranks._token, "rank")
        self.start()

    def end(self) -> None:
        self.gone.set()
        self.channel.close()
        self.commands.put(({"do": "end"}, b""))

    def run(self) -> None:
        threading.Thread(target=self._read, daemon=True).start()
        with suppress(CommError, OSError):
            if self.ranks.broken == "before":
                self._say("failed", message="The toy is broken.")
                return
            self._say("hello", world=self.ranks.world, pid=0, host="threads")
            while (got := self.commands.get())[0]["do"] != "end":
                said, blob = got
                if said["do"] == "join":
                    if self.ranks.broken:
                        self._say("failed", batch=None, code="refused", message="The toy is broken.")
                        break
                    self._say("ready", facts=FACTS)
                elif said["do"] == "run":
                    self._segment(said, blob)
        self.channel.close()

    def _read(self) -> None:
        try:
            while True:
                said, blob = self.channel.receive()
                if said["do"] == "stop":
                    self.stops.add(said["batch"])
                elif said["do"] == "exit":
                    break
                else:
                    self.commands.put((said, blob))
        except (CommError, OSError):
            pass
        self.end()

    def _say(self, told: str, blob: bytes = b"", **said: Any) -> None:
        self.channel.send({"told": told, "rank": self.number, **said}, blob)

    def _segment(self, said: dict[str, Any], blob: bytes) -> None:
        """Only the leader works: the others are taken by nobody else as long as it does."""
        batch, ranks, first, jobs = said["batch"], said["ranks"], said["step"], said["jobs"]
        if self.number != ranks[0]:
            return
        self.ranks.segments.append((batch, tuple(ranks), first))
        ids = [job["id"] for job in jobs]
        assert not first or json.loads(blob) == [*ids, first], "another state than its own"
        for step in range(first + 1, jobs[0]["steps"] + 1):
            pace = self.ranks.paces.get(jobs[0]["prompt"], self.ranks.pace)
            if self.gone.wait(pace / len(ranks)):
                raise CommError("ended in a step")
            if self.ranks.poison and self.ranks.poison in jobs[0]["prompt"]:
                self.end()
                raise CommError("poison")
            state, took = json.dumps([*ids, step]).encode(), pace
            self._say("step", state, batch=batch, step=step, seconds=took, imbalance=1.0, exposed=0.0)
            for job in jobs:
                self._say("preview", b"png%d" % step, batch=batch, job=job["id"], step=step)
            if batch in self.stops and step < jobs[0]["steps"]:
                self.stops.discard(batch)
                self._say("stopped", state, batch=batch, step=step)
                return
        for job in jobs:
            timings = {"encode": 0.0, "denoise": 0.1, "decode": 0.0}
            name = "video.mp4" if job["kind"] == "video" else "image.png"
            self._say("made", made(job), batch=batch, job=job["id"], name=name, timings=timings, about={})
        self.stops.discard(batch)
        self._say("done", batch=batch)


def made(asked: dict[str, Any]) -> bytes:
    """What comes of a request: it depends on that alone."""
    return hashlib.sha256(json.dumps([asked["prompt"], asked["seed"]]).encode()).digest()
